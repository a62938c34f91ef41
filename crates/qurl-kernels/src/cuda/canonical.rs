//! Packed weights as rows and back: the form of [`crate::canonical`] out of and into tiles.
//!
//! Numbers are read as they lie and brought into rows by the host, which sends them somewhere anyway; the
//! other way rows go through the kernel that packs them.

use super::bits4::is_bits4;
use super::constants::{TILE_DEPTH, TILE_ROWS};
use super::memory::Buffer;
use super::queue::CudaQueue;
use super::weight::CudaWeight;
use crate::canonical;
use crate::types::{DeviceError, WeightShape};

/// Bytes that keep their order in a tile.
const CHUNK: usize = 16;

/// Appends the canonical form.
pub(super) fn export(
    queue: &mut CudaQueue,
    weight: &CudaWeight,
    to: &mut Vec<u8>,
) -> Result<(), DeviceError> {
    let shape = shape(weight);
    let (data, scales) = (weight.data(), weight.scale_buffer());
    let mut numbers = vec![0u8; data.bytes()];
    queue.read_values(data.at(), &mut numbers)?;
    let mut values = vec![0u8; scales.map_or(0, Buffer::bytes)];
    queue.read_values(weight.scales(), &mut values)?;
    if is_bits4(shape.format) {
        weight.export_bits4(&numbers, &values, to);
        return Ok(());
    }
    match weight.tiles() {
        Some(_) => from_tiles(&numbers, shape.n, canonical::row_bytes(shape), to),
        None => to.extend_from_slice(&numbers),
    }
    to.extend_from_slice(&values);
    Ok(())
}

/// Takes over the canonical form.
pub(super) fn import(
    queue: &mut CudaQueue,
    bytes: &[u8],
    weight: &mut CudaWeight,
) -> Result<(), DeviceError> {
    let shape = shape(weight);
    if is_bits4(shape.format) {
        weight.import_bits4(queue, bytes);
        return queue.result();
    }
    let (numbers, scales) = bytes.split_at(canonical::row_bytes(shape) * shape.n);
    let rows = match weight.tiles() {
        Some(_) => queue.alloc(numbers.len()),
        None => weight.data().at(),
    };
    queue.write_values(rows, numbers);
    weight.pack(queue, rows);
    queue.write_values(weight.scales(), scales);
    queue.result()
}

pub(super) fn shape(weight: &CudaWeight) -> WeightShape {
    WeightShape { n: weight.n, k: weight.k, format: weight.format, trained: weight.trained }
}

/// Rows of so many bytes out of the tiles of `gemm_pack.cu`: `[n / 64][row / 128][64 rows][128 bytes]`, chunk
/// c of row r at chunk c ^ (r % 8).
fn from_tiles(tiles: &[u8], n: usize, row_bytes: usize, to: &mut Vec<u8>) {
    let blocks = row_bytes.div_ceil(TILE_DEPTH);
    for row in 0..n {
        let in_tile = row % TILE_ROWS;
        for byte in (0..row_bytes).step_by(CHUNK) {
            let tile = row / TILE_ROWS * blocks + byte / TILE_DEPTH;
            let chunk = (byte % TILE_DEPTH / CHUNK) ^ (in_tile % 8);
            let at = (tile * TILE_ROWS + in_tile) * TILE_DEPTH + chunk * CHUNK;
            to.extend_from_slice(&tiles[at..at + CHUNK]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The index arithmetic of `gemm_pack.cu`, thread by thread.
    fn to_tiles(rows: &[u8], n: usize, row_bytes: usize) -> Vec<u8> {
        let k_blocks = row_bytes.div_ceil(128);
        let mut tiles = vec![0; n.div_ceil(64) * k_blocks * 512 * CHUNK];
        for at in 0..tiles.len() / CHUNK {
            let (place, row_in_tile, tile) = (at % 8, at / 8 % 64, at / 512);
            let row = tile / k_blocks * 64 + row_in_tile;
            let byte = tile % k_blocks * 128 + (place ^ (row_in_tile & 7)) * 16;
            if row < n && byte < row_bytes {
                let from = &rows[row * row_bytes + byte..][..CHUNK];
                tiles[at * CHUNK..][..CHUNK].copy_from_slice(from);
            }
        }
        tiles
    }

    #[test]
    fn rows_come_back_out_of_tiles() {
        for (n, row_bytes) in [(1, 16), (64, 128), (65, 144), (130, 400)] {
            let rows: Vec<u8> = (0..n * row_bytes).map(|i| (i * 7 + i / 251) as u8).collect();
            let mut back = Vec::new();
            from_tiles(&to_tiles(&rows, n, row_bytes), n, row_bytes, &mut back);
            assert_eq!(back, rows, "{n} rows of {row_bytes} bytes");
        }
    }
}
