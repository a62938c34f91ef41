//! The few functions of NCCL that are used, found at run time in `libnccl.so.2`.
//!
//! Signatures and numbers are those of `nccl.h`; all of them have been the same since NCCL 2.18, older ones
//! are refused.

use super::CollectiveError;
use libloading::Library as Loaded;
use std::ffi::{CStr, c_char, c_int, c_void};

/// The variable that names the library's file.
const FILE: &str = "QURL_NCCL";
/// The oldest version that will do, as the library tells it: 2.18.0.
const OLDEST: c_int = 21_800;
/// `ncclUint8`
pub(crate) const BYTES: c_int = 1;

/// `ncclComm_t`
pub(crate) type Comm = *mut c_void;
/// An address of the device, as NCCL takes it.
type At = *mut c_void;
/// `cudaStream_t`, which is the driver's handle.
type Stream = *mut c_void;

/// `ncclUniqueId`: what the ranks of a clique have in common.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub [u8; 128]);

macro_rules! functions {
    ($($function:ident as $symbol:literal ($($arg:ty),*) -> $result:ty;)*) => {
        /// NCCL's functions; `ncclResult_t` is 0 for success.
        pub(crate) struct Nccl {
            $(#[doc = concat!("`", $symbol, "`")] pub $function: unsafe extern "C" fn($($arg),*) -> $result,)*
            /// Where it was found.
            pub file: String,
            /// Major, minor and patch.
            pub version: (c_int, c_int, c_int),
        }

        impl Nccl {
            fn load(library: &Loaded, file: String, version: (c_int, c_int, c_int)) -> Result<Nccl, String> {
                // SAFETY: the signatures are those of the header; the library is never closed.
                unsafe {
                    $(let $function = *library
                        .get::<unsafe extern "C" fn($($arg),*) -> $result>(concat!($symbol, "\0").as_bytes())
                        .map_err(|e| e.to_string())?;)*
                    Ok(Nccl { $($function,)* file, version })
                }
            }
        }
    };
}

functions! {
    unique_id as "ncclGetUniqueId" (*mut UniqueId) -> c_int;
    init_rank as "ncclCommInitRank" (*mut Comm, c_int, UniqueId, c_int) -> c_int;
    destroy as "ncclCommDestroy" (Comm) -> c_int;
    async_error as "ncclCommGetAsyncError" (Comm, *mut c_int) -> c_int;
    error_string as "ncclGetErrorString" (c_int) -> *const c_char;
    last_error as "ncclGetLastError" (Comm) -> *const c_char;
    group_start as "ncclGroupStart" () -> c_int;
    group_end as "ncclGroupEnd" () -> c_int;
    send as "ncclSend" (At, usize, c_int, c_int, Comm, Stream) -> c_int;
    recv as "ncclRecv" (At, usize, c_int, c_int, Comm, Stream) -> c_int;
    all_gather as "ncclAllGather" (At, At, usize, c_int, Comm, Stream) -> c_int;
    broadcast as "ncclBroadcast" (At, At, usize, c_int, c_int, Comm, Stream) -> c_int;
}

impl Nccl {
    /// The library, if the machine has one that is new enough.
    pub fn find() -> Result<Nccl, CollectiveError> {
        let names = match std::env::var(FILE).ok().filter(|path| !path.is_empty()) {
            Some(path) => vec![path],
            None => ["libnccl.so.2", "libnccl.so"].map(str::to_string).to_vec(),
        };
        let mut reasons = Vec::new();
        for name in &names {
            // SAFETY: NVIDIA's libraries may be loaded at any time.
            match unsafe { Loaded::new(name) }
                .map_err(|e| e.to_string())
                .and_then(|library| open(library, name))
            {
                Ok(nccl) => return Ok(nccl),
                Err(reason) => reasons.push(reason),
            }
        }
        let reason = format!(
            "ranks on GPUs exchange by NCCL 2.18 or newer; looked for {} where the loader looks ({}); {FILE} \
             may name the library's file",
            names.join(", "),
            reasons.join("; ")
        );
        Err(CollectiveError::Library { library: "NCCL".to_string(), reason })
    }

    /// What a result means, with the last error of a clique where there is one.
    pub fn text(&self, status: c_int, comm: Comm) -> String {
        let read = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: texts of the library end with a zero and live until the next error.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_string(),
        };
        // SAFETY: any number is a status; the clique is alive or none.
        let (what, detail) = unsafe { ((self.error_string)(status), (self.last_error)(comm)) };
        let (what, detail) = (read(what), read(detail));
        match detail.is_empty() {
            true => format!("{what} ({status})"),
            false => format!("{what} ({status}): {detail}"),
        }
    }

    /// An error where a result is not success.
    pub fn done(&self, what: &str, status: c_int, comm: Comm) -> Result<(), CollectiveError> {
        match status {
            0 => Ok(()),
            status => {
                Err(CollectiveError::Failed { what: what.to_string(), reason: self.text(status, comm) })
            }
        }
    }
}

fn open(library: Loaded, name: &str) -> Result<Nccl, String> {
    let mut version = 0;
    // SAFETY: the signature is that of the header, the place is valid.
    let status = unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0");
        (ask.map_err(|e| format!("{name}: {e}"))?)(&mut version)
    };
    let parts = (version / 10_000, version / 100 % 100, version % 100);
    if status != 0 || version < OLDEST {
        let (major, minor, patch) = parts;
        return Err(format!("{name} is NCCL {major}.{minor}.{patch}, expected 2.18 or newer"));
    }
    let nccl = Nccl::load(&library, name.to_string(), parts).map_err(|e| format!("{name}: {e}"))?;
    std::mem::forget(library); // its threads outlive whoever opened it
    Ok(nccl)
}
