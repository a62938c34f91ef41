//! Rows of tables, rows of batches, and dot products of rows.

use super::batch::CudaBatch;
use super::device::Cuda;
use super::kernels::{self, GatherTokens, OuterProduct};
use super::launch::Launch;
use super::queue::CudaQueue;
use super::sums;
use crate::ops::{Gather, Index, RowDots, RowDotsBackward, ScatterAdd};
use crate::types::{DeviceError, Token};

/// Threads that copy or add a row.
const ROW_THREADS: usize = 256;

/// [`crate::Queue::gather`]
pub(super) fn gather(queue: &mut CudaQueue, args: Gather<Cuda>) {
    let Gather { table, index, width, out } = args;
    let (limit, d) = (table.len / width, width as u32);
    let (rows, ids) = match index {
        Index::Rows(rows) => {
            assert!(rows.iter().all(|&row| (row as usize) < limit), "gather: rows of the table");
            (rows.len(), queue.stage(rows))
        }
        Index::Sampled(batch) => {
            assert!(batch.shape.rows <= limit, "gather: sampled rows");
            (batch.shape.sampled, batch.sampled())
        }
        Index::Tokens { batch, sampled } => {
            assert!(batch.shape.rows * width <= out.len, "gather: output");
            let known = sampled.map_or(0, |sampled| sampled.rows);
            queue.need(batch, |needs| {
                needs.most.token = needs.most.token.min(limit);
                needs.most.sampled = needs.most.sampled.min(known);
            });
            let args = GatherTokens {
                table: table.at(),
                tokens: batch.token_words(),
                sampled: sampled.map_or(0, |sampled| sampled.at()),
                d,
                out: out.at(),
            };
            let launch = Launch::blocks(batch.shape.rows, ROW_THREADS);
            return queue.launch(kernels::gather_tokens, launch, args);
        }
    };
    assert!(rows * width <= out.len, "gather: output");
    let args = kernels::Gather { table: table.at(), ids, d, out: out.at() };
    queue.launch(kernels::gather, Launch::blocks(rows, ROW_THREADS), args);
}

/// [`crate::Queue::scatter_add`]
pub(super) fn scatter_add(queue: &mut CudaQueue, args: ScatterAdd<Cuda>) {
    let ScatterAdd { rows, index, width, table } = args;
    let tokens;
    let ids: &[u32] = match index {
        Index::Rows(ids) => ids,
        Index::Sampled(batch) => &batch.sampled_rows,
        Index::Tokens { batch, .. } => {
            tokens = known_tokens(batch);
            &tokens
        }
    };
    let inside = ids.iter().all(|&id| (id as usize + 1) * width <= table.len);
    assert!(inside && ids.len() * width <= rows.len, "scatter: rows");
    // Rows of one target are added by one block, in their order.
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|&i| ids[i as usize]);
    let (mut targets, mut starts) = (Vec::new(), Vec::new());
    for (place, &i) in order.iter().enumerate() {
        if targets.last() != Some(&ids[i as usize]) {
            targets.push(ids[i as usize]);
            starts.push(place as u32);
        }
    }
    starts.push(order.len() as u32);
    let launch = Launch::blocks(targets.len(), ROW_THREADS);
    let [ids, starts, order] = [&targets, &starts, &order].map(|list| queue.stage(list));
    let args =
        kernels::ScatterAdd { rows: rows.at(), ids, starts, order, d: width as u32, table: table.at() };
    queue.launch(kernels::scatter_add, launch, args);
}

/// The tokens of a batch, all of which the host has seen.
fn known_tokens(batch: &CudaBatch) -> Vec<u32> {
    let known = batch.tokens.iter().map(|token| match *token {
        Token::Id(id) => id,
        Token::Sampled(row) => panic!("scatter: the host has not seen the token that row {row} sampled"),
    });
    known.collect()
}

/// [`crate::Queue::row_dots`]
pub(super) fn row_dots(queue: &mut CudaQueue, args: RowDots<Cuda>) -> Result<Vec<f32>, DeviceError> {
    let RowDots { hidden, rows, w } = args;
    assert!(rows * w.len <= hidden.len, "row dots: rows");
    let results = queue.alloc(4 * rows);
    let args = kernels::RowDots { x: hidden.at(), w: w.at(), d: w.len as u32, out: results };
    queue.launch(kernels::row_dots, Launch::blocks(rows, 32), args);
    let mut values = vec![0.0; rows];
    queue.read_values(results, &mut values)?;
    Ok(values)
}

/// [`crate::Queue::row_dots_backward`]
pub(super) fn row_dots_backward(queue: &mut CudaQueue, args: RowDotsBackward<Cuda>) {
    let RowDotsBackward { hidden, w, gradient, dhidden, dw } = args;
    let (rows, d) = (gradient.len(), w.len);
    assert!(rows * d <= hidden.len.min(dhidden.len) && dw.len == d, "row dots backward: rows");
    let gradient = queue.stage(gradient);
    let count = (rows * d) as u64;
    let args = OuterProduct { g: gradient, w: w.at(), d: d as u32, count, dx: dhidden.at() };
    queue.launch(kernels::outer_product, Launch::elements(rows * d), args);
    sums::of_columns(queue, hidden.at(), gradient, rows, d, dw.at());
}
