//! cuBLASLt for the large bf16 GEMMs of the backward pass: input gradient and weight gradient, sums in f32.
//!
//! Forward GEMMs are the engine's own ([`super::gemm`]): the trainer's log-probabilities have the engine's
//! bits. A plan (descriptors and the algorithm that the library recommends) is made once per shape. The
//! library counts columns first; with operands swapped its column-major result is our row-major one.

use super::context::Context;
use super::ffi::{self, CublasLt, DevicePtr, Handle, LtAlgorithm, LtHeuristic};
use super::memory::Buffer;
use super::queue::CudaQueue;
use crate::ops::Output;
use crate::types::DeviceError;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Arc;

const COMPUTE_F32: c_int = 68;
const TYPE_F32: c_int = 0;
const TYPE_BF16: c_int = 14;
const DESC_TRANSPOSE_B: c_int = 4;
const PREFERENCE_WORKSPACE: c_int = 1;
const WORKSPACE: usize = 64 << 20;

/// What the result of a GEMM is rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Number {
    F32,
    Bf16,
}

/// One GEMM `d[m, n] = a op(b) (+ d)` in the library's column-major terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    transpose_b: bool,
    add: bool,
    result: Number,
}

struct Plan {
    desc: Handle,
    a: Handle,
    b: Handle,
    d: Handle,
    algorithm: LtAlgorithm,
}

/// The library, its workspace and its plans.
pub(super) struct Lt {
    /// None on a device that only counts.
    library: Option<CublasLt>,
    handle: Handle,
    workspace: Buffer,
    plans: HashMap<Shape, Option<Plan>>,
}

impl Lt {
    /// Opens the library in the current context; `None` where the machine does not have it.
    pub fn open(context: &Arc<Context>) -> Result<Option<Lt>, DeviceError> {
        let workspace = || Buffer::new(context, WORKSPACE, "workspace of cuBLASLt");
        if context.only_counts() {
            let (library, handle) = (None, std::ptr::null_mut());
            return Ok(Some(Lt { library, handle, workspace: workspace()?, plans: HashMap::new() }));
        }
        let Ok(library) = ffi::cublas_lt() else { return Ok(None) };
        let workspace = workspace()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place is valid and a context is current.
        let status = unsafe { (library.create)(&mut handle) };
        Ok((status == 0).then_some(Lt { library: Some(library), handle, workspace, plans: HashMap::new() }))
    }

    /// Whether operands of these row lengths have the alignment that the fast kernels need.
    pub fn takes(n: usize, k: usize) -> bool {
        n.is_multiple_of(8) && k.is_multiple_of(8)
    }

    /// `dx[rows, k] (+)= dy[rows, n] w[n, k]`; whether the library could.
    pub fn input_gradient(
        &mut self,
        queue: &mut CudaQueue,
        dy: DevicePtr,
        w: DevicePtr,
        rows: usize,
        n: usize,
        k: usize,
        dx: DevicePtr,
        output: Output,
        result: Number,
    ) -> bool {
        let add = output == Output::Add;
        let shape = Shape { m: k, n: rows, k: n, transpose_b: false, add, result };
        self.run(queue, shape, w, dy, dx)
    }

    /// `dw[n, k] += dy[rows, n]^T x[rows, k]`
    pub fn weight_gradient(
        &mut self,
        queue: &mut CudaQueue,
        x: DevicePtr,
        dy: DevicePtr,
        rows: usize,
        n: usize,
        k: usize,
        dw: DevicePtr,
    ) -> bool {
        let shape = Shape { m: k, n, k: rows, transpose_b: true, add: true, result: Number::F32 };
        self.run(queue, shape, x, dy, dw)
    }

    fn run(&mut self, queue: &mut CudaQueue, shape: Shape, a: DevicePtr, b: DevicePtr, d: DevicePtr) -> bool {
        let Some(library) = &self.library else { return true };
        if queue.has_failed() {
            return true;
        }
        if !self.plans.contains_key(&shape) {
            let plan = plan(library, self.handle, shape);
            self.plans.insert(shape, plan);
        }
        let Some(Some(plan)) = self.plans.get(&shape) else { return false };
        let (one, beta) = (1.0f32, if shape.add { 1.0f32 } else { 0.0 });
        // SAFETY: the descriptors describe the operands; the caller gives addresses of their sizes.
        let status = unsafe {
            (library.matmul)(
                self.handle,
                plan.desc,
                (&raw const one).cast(),
                a,
                plan.a,
                b,
                plan.b,
                (&raw const beta).cast(),
                d,
                plan.d,
                d,
                plan.d,
                &plan.algorithm,
                self.workspace.at(),
                WORKSPACE,
                queue.stream,
            )
        };
        if status != 0 {
            queue.fail(format!("cuBLASLt GEMM {shape:?}: status {status}"));
        }
        true
    }
}

/// Descriptors of a GEMM, and the algorithm that the library recommends.
fn plan(lib: &CublasLt, handle: Handle, shape: Shape) -> Option<Plan> {
    let layout = |rows: usize, columns: usize, ty: c_int| {
        let mut layout = std::ptr::null_mut();
        // SAFETY: the place is valid.
        let status =
            unsafe { (lib.layout_create)(&mut layout, ty, rows as u64, columns as u64, rows as i64) };
        (status == 0).then_some(layout)
    };
    let (b_rows, b_columns) = if shape.transpose_b { (shape.n, shape.k) } else { (shape.k, shape.n) };
    let a = layout(shape.m, shape.k, TYPE_BF16)?;
    let b = layout(b_rows, b_columns, TYPE_BF16)?;
    let result = match shape.result {
        Number::F32 => TYPE_F32,
        Number::Bf16 => TYPE_BF16,
    };
    let d = layout(shape.m, shape.n, result)?;
    let (mut desc, mut preference, mut found) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
    let mut recommended = LtHeuristic::EMPTY;
    // SAFETY: every place is valid; attributes have the sizes that the library documents.
    unsafe {
        if (lib.desc_create)(&mut desc, COMPUTE_F32, TYPE_F32) != 0 {
            return None;
        }
        let set = |attribute: c_int, value: c_int| {
            (lib.desc_set)(desc, attribute, (&raw const value).cast(), size_of::<c_int>());
        };
        set(DESC_TRANSPOSE_B, c_int::from(shape.transpose_b));
        (lib.preference_create)(&mut preference);
        let bytes = WORKSPACE as u64;
        (lib.preference_set)(preference, PREFERENCE_WORKSPACE, (&raw const bytes).cast(), size_of::<u64>());
        let status = (lib.heuristic)(handle, desc, a, b, d, d, preference, 1, &mut recommended, &mut found);
        (lib.preference_destroy)(preference);
        if status != 0 || found == 0 || recommended.state != 0 {
            return None;
        }
    }
    Some(Plan { desc, a, b, d, algorithm: recommended.algorithm })
}

impl Drop for Lt {
    fn drop(&mut self) {
        let Some(library) = &self.library else { return };
        let plans = std::mem::take(&mut self.plans);
        // SAFETY: nothing uses the handles any more.
        unsafe {
            for plan in plans.into_values().flatten() {
                [plan.a, plan.b, plan.d].into_iter().for_each(|layout| {
                    (library.layout_destroy)(layout);
                });
                (library.desc_destroy)(plan.desc);
            }
            (library.destroy)(self.handle);
        }
    }
}
