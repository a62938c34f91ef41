//! An optimizer's moments in a checkpoint, in the format that they have on the device.

use super::CheckpointError;
use super::tensors::{self, Pieces, Tree, Values};
use crate::ranks::Ranks;
use qurl_kernels::types::{MOMENT_BLOCK, MomentFormat, MomentValues, Moments};
use qurl_model::{ParamInfo, Params};
use safetensors::Dtype;
use std::path::Path;

const FIRST: &str = "first";
const SECOND: &str = "second";

/// Exponents that the numbers of a block share, beside the values of a tree.
fn exponents(of: &str) -> String {
    format!("{of}_exponents")
}

/// Writes the moments of these pieces.
pub fn write(
    path: &Path,
    layout: &Params<ParamInfo>,
    pieces: Pieces,
    moments: &Params<Moments>,
) -> Result<(), CheckpointError> {
    let names = [exponents(FIRST), exponents(SECOND)];
    let of = |select: fn(&Moments) -> &MomentValues| moments.as_ref().map(select);
    let mut trees = Vec::new();
    let moments = [(FIRST, of(|m| &m.first)), (SECOND, of(|m| &m.second))];
    for ((name, leaves), exponents) in moments.into_iter().zip(&names) {
        let values = leaves.clone().map(|leaf| match leaf {
            MomentValues::F32(values) => Values::F32(values),
            MomentValues::Bf16(values) => Values::Bf16(values),
            MomentValues::EightBit { values, .. } => Values::U8(values),
        });
        trees.push((Tree::whole(name), values));
        if leaves.embed.format() == MomentFormat::EightBit {
            let of = leaves.map(|leaf| match leaf {
                MomentValues::EightBit { exponents, .. } => Values::U8(exponents),
                MomentValues::F32(_) | MomentValues::Bf16(_) => Values::U8(&[]),
            });
            trees.push((Tree { name: exponents, per: MOMENT_BLOCK }, of));
        }
    }
    tensors::write(path, layout, pieces, &trees)
}

/// Reads the moments of a rank's pieces, which `written` ranks have written.
pub fn read(
    dir: &Path,
    name: &str,
    written: usize,
    layout: &Params<ParamInfo>,
    ranks: &Ranks,
) -> Result<Params<Moments>, CheckpointError> {
    let pieces = Pieces { rank: ranks.rank(), ranks: ranks.size() };
    let one = |of: &str| -> Result<Params<MomentValues>, CheckpointError> {
        let tree = Tree::whole(of);
        Ok(match tensors::dtype(dir, name, written, layout, tree)? {
            Dtype::BF16 => tensors::read(dir, name, written, layout, pieces, tree)?.map(MomentValues::Bf16),
            Dtype::U8 => {
                let values = tensors::read::<u8>(dir, name, written, layout, pieces, tree)?;
                let shared = Tree { name: &exponents(of), per: MOMENT_BLOCK };
                let exponents = tensors::read::<u8>(dir, name, written, layout, pieces, shared)?;
                let both = values.zip(exponents).map_err(|e| CheckpointError::Layout(e.to_string()))?;
                both.map(|(values, exponents)| MomentValues::EightBit { values, exponents })
            }
            _ => tensors::read(dir, name, written, layout, pieces, tree)?.map(MomentValues::F32),
        })
    };
    let both = one(FIRST)?.zip(one(SECOND)?).map_err(|e| CheckpointError::Layout(e.to_string()))?;
    Ok(both.map(|(first, second)| Moments { first, second }))
}
