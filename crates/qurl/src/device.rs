//! The device of a command: opened once, and every command written once over whatever device it is.

use crate::input::OrBad;
use crate::output::err;
use qurl_kernels::cpu::CpuError;
use qurl_kernels::cpu::level::Level;
use qurl_kernels::cuda::counting::GpuProfile;
use qurl_kernels::{Cpu, Cuda, DeviceError, DeviceKind};
use qurl_train::recipe::Recipe;

/// The option that commands share.
#[derive(clap::Args, Clone, Copy)]
pub struct DeviceArg {
    /// Where to compute: auto (a GPU if there is one), cpu or cuda
    #[arg(long, default_value_t = DeviceKind::Auto)]
    device: DeviceKind,
}

impl DeviceArg {
    /// The device asked for.
    pub fn get(self) -> DeviceKind {
        self.device
    }
}

/// The option of commands whose recipe names a device, which it overrides.
#[derive(clap::Args, Clone, Copy)]
pub struct RecipeDevice {
    /// Where to compute, in place of the recipe's trainer.device: auto (a GPU if there is one), cpu or cuda
    #[arg(long)]
    device: Option<DeviceKind>,
}

impl RecipeDevice {
    /// The recipe with the device asked for.
    pub fn put_into(self, mut recipe: Recipe) -> Recipe {
        recipe.trainer.device = self.device.unwrap_or(recipe.trainer.device);
        recipe
    }
}

/// A kind of GPU that a plan is made for, by its short name.
pub fn gpu(name: &str) -> Result<GpuProfile, String> {
    GpuProfile::named(name).ok_or_else(|| format!("expected one of {}", GpuProfile::names().join(", ")))
}

/// A device in use.
pub enum Opened {
    /// The CPU.
    Cpu(Cpu),
    /// A GPU.
    Cuda(Cuda),
}

/// Opens a device. `auto` takes the CPU where no GPU can be used, and says why if there is a driver.
pub fn open(device: DeviceKind) -> anyhow::Result<Opened> {
    match device {
        DeviceKind::Cpu => Ok(Opened::Cpu(Cpu::from_env().or_bad()?)),
        DeviceKind::Cuda => Ok(Opened::Cuda(open_cuda().or_bad()?)),
        DeviceKind::Auto => match open_cuda() {
            Ok(cuda) => Ok(Opened::Cuda(cuda)),
            Err(reason) => {
                if Cuda::has_driver() {
                    err!("{reason}; computing on the CPU");
                }
                open(DeviceKind::Cpu)
            }
        },
    }
}

/// The first GPU, with all kernels compiled.
fn open_cuda() -> Result<Cuda, DeviceError> {
    open_gpu(0)
}

/// The CPU of a rank that shares it with others: its part of the threads, where nothing else is said.
pub fn open_cpu(ranks_here: Option<usize>) -> Result<Cpu, CpuError> {
    let said = std::env::var_os("QURL_THREADS").is_some_and(|threads| !threads.is_empty());
    match ranks_here.filter(|_| !said) {
        None => Cpu::from_env(),
        Some(ranks) => {
            let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
            Ok(Cpu::new(Level::from_env()?, (threads / ranks.max(1)).max(1)))
        }
    }
}

/// A GPU by its number, with all kernels compiled: no step of a run waits for the compiler.
pub fn open_gpu(ordinal: usize) -> Result<Cuda, DeviceError> {
    let cuda = Cuda::open(ordinal)?;
    cuda.compile_kernels(|files| {
        err!("compiling {files} files of kernels, once for this machine and program")
    })?;
    Ok(cuda)
}

/// Runs an expression with the opened device as an `Arc`.
macro_rules! on_device {
    ($device:expr, $opened:ident => $body:expr) => {
        match $crate::device::open($device)? {
            $crate::device::Opened::Cpu(device) => {
                let $opened = std::sync::Arc::new(device);
                $body
            }
            $crate::device::Opened::Cuda(device) => {
                let $opened = std::sync::Arc::new(device);
                $body
            }
        }
    };
}
pub(crate) use on_device;
