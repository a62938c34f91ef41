//! The CPU backend: kernels compiled for several instruction sets, one chosen at run time, run on all
//! threads.

pub mod adamw;
mod adapter;
mod arena;
pub mod attention;
pub mod attention_backward;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod buf;
mod canonical;
mod device;
pub mod elementwise;
mod frozen;
pub mod gemm;
pub mod head;
pub mod kv;
pub mod level;
mod moments;
pub mod norm;
mod pack;
pub mod peak;
pub mod pool;
pub mod quant;
mod queue;
pub mod sample;
mod scalar;
mod simd;
mod source;
mod top;

pub use device::{Cpu, CpuBatch, CpuError, CpuTokens, CpuWeight};
pub use moments::CpuMoments;
pub use queue::CpuQueue;

use arena::Arena;
use buf::Scratch;
use level::Level;
use pool::Pool;

/// What every CPU kernel needs: the instruction set, the threads and memory.
pub struct Context {
    pub(crate) level: Level,
    pub(crate) pool: Pool,
    pub(crate) scratch: Scratch,
    pub(crate) weights: Arena,
}

impl Context {
    /// A context at this level with this many threads.
    ///
    /// # Panics
    /// If the machine does not have the instructions of the level.
    pub fn new(level: Level, threads: usize) -> Self {
        assert!(Level::available().contains(&level), "this machine cannot run {level}");
        Context { level, pool: Pool::new(threads), scratch: Scratch::default(), weights: Arena::default() }
    }

    /// The instruction set in use.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Threads that take part in every kernel.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Rows of a packed strip at this level.
    pub(crate) fn strip(&self) -> usize {
        match self.level {
            Level::Scalar => 4,
            Level::Avx2 => 6,
            Level::Avx512 | Level::Avx512Bf16 => 12,
        }
    }

    /// Columns of a packed panel at this level.
    pub(crate) fn panel(&self) -> usize {
        match self.level {
            Level::Scalar | Level::Avx2 => 16,
            Level::Avx512 | Level::Avx512Bf16 => 32,
        }
    }
}
