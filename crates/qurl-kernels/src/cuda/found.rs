//! What this machine has of CUDA, without opening a device: what `qurl --version` tells, also where a device
//! cannot be opened.

use super::context::{ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR, error_text};
use super::ffi::{self, Driver, Status};
use std::ffi::{CStr, c_char, c_int};

/// The CUDA of a machine that has a driver.
pub struct Found {
    /// The newest CUDA that the driver is made for: major and minor version.
    pub driver: (u32, u32),
    /// The GPUs in the order of their numbers.
    pub gpus: Vec<FoundGpu>,
    /// Version of the run-time compiler, or why there is none.
    pub nvrtc: Result<(u32, u32), String>,
    /// Whether cuBLASLt is there, or why not.
    pub cublas_lt: Result<(), String>,
}

/// A GPU that the driver sees.
pub struct FoundGpu {
    /// As the driver names it.
    pub name: String,
    /// Compute capability: major and minor version.
    pub capability: (u32, u32),
}

/// Looks for the driver, its GPUs and the libraries; an error says why there is no driver that can be used.
pub fn found() -> Result<Found, String> {
    let (driver, version) = ffi::driver()?;
    let nvrtc = ffi::nvrtc().map(|nvrtc| {
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: both places are valid.
        unsafe { (nvrtc.version)(&mut major, &mut minor) };
        (major.unsigned_abs(), minor.unsigned_abs())
    });
    Ok(Found { driver: version, gpus: gpus(&driver)?, nvrtc, cublas_lt: ffi::cublas_lt().map(|_| ()) })
}

fn gpus(driver: &Driver) -> Result<Vec<FoundGpu>, String> {
    let done = |status: Status| match status {
        0 => Ok(()),
        status => Err(error_text(driver, status)),
    };
    let mut count: c_int = 0;
    // SAFETY: the place is valid for what the function writes.
    unsafe {
        done((driver.init)(0))?;
        done((driver.device_count)(&mut count))?;
    }
    (0..count).map(|number| gpu(driver, number, done)).collect()
}

fn gpu(
    driver: &Driver,
    number: c_int,
    done: impl Fn(Status) -> Result<(), String>,
) -> Result<FoundGpu, String> {
    let (mut device, mut major, mut minor) = (0, 0, 0);
    let mut name = [0 as c_char; 256];
    // SAFETY: every place is valid for what the function writes; the name keeps a zero at its end.
    let name = unsafe {
        done((driver.device_get)(&mut device, number))?;
        done((driver.device_name)(name.as_mut_ptr(), 255, device))?;
        done((driver.device_attribute)(&mut major, ATTRIBUTE_MAJOR, device))?;
        done((driver.device_attribute)(&mut minor, ATTRIBUTE_MINOR, device))?;
        CStr::from_ptr(name.as_ptr())
    };
    let capability = (major.unsigned_abs(), minor.unsigned_abs());
    Ok(FoundGpu { name: name.to_string_lossy().into_owned(), capability })
}
