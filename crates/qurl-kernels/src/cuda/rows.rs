//! Rows of tables, rows of batches, and dot products of rows.

use super::batch::CudaBatch;
use super::device::Cuda;
use super::launch::args;
use super::queue::CudaQueue;
use super::sums;
use crate::ops::{Gather, Index, RowDots, RowDotsBackward, ScatterAdd};
use crate::types::{DeviceError, Token};

/// Blocks of 256 threads for so many elements.
pub(super) fn each(elements: usize) -> [usize; 3] {
    [elements.div_ceil(256), 1, 1]
}

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
            let sampled = sampled.map_or(0, |sampled| sampled.at());
            let given = args![table.at(), batch.token_words(), sampled, d, out.at()];
            let grid = [batch.shape.rows, 1, 1];
            return queue.launch_next("elementwise", "gather_tokens", grid, 256, 0, given);
        }
    };
    assert!(rows * width <= out.len, "gather: output");
    let given = args![table.at(), ids, d, out.at()];
    queue.launch_next("elementwise", "gather", [rows, 1, 1], 256, 0, given);
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
    let [staged_targets, staged_starts, staged_order] =
        [&targets, &starts, &order].map(|list| queue.stage(list));
    let given = args![rows.at(), staged_targets, staged_starts, staged_order, width as u32, table.at()];
    queue.launch("elementwise", "scatter_add", [targets.len(), 1, 1], 256, 0, given);
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
    let given = args![hidden.at(), w.at(), w.len as u32, results];
    queue.launch("elementwise", "row_dots", [rows, 1, 1], 32, 0, given);
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
    let given = args![gradient, w.at(), d as u32, rows * d, dhidden.at()];
    queue.launch("elementwise", "outer_product", each(rows * d), 256, 0, given);
    sums::of_columns(queue, hidden.at(), gradient, rows, d, dw.at());
}
