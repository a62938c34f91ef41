//! How the modules of a linear layer share the matrices of a low-rank adapter.

/// One module of a linear layer that has several (queries, keys and values; gate and up projections), in the
/// matrices of the layer's adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterBlock {
    /// First output of the layer that the module has.
    pub first: usize,
    /// Outputs of the module.
    pub outputs: usize,
    /// First of the module's `rank` columns of the block-diagonal matrix.
    pub at: usize,
}

/// The block-diagonal form of an adapter's second matrix: `[n, width]` of a layer of n outputs, in which each
/// module has its own columns, and zeros elsewhere. As it is trained its blocks are stacked:
/// `[outputs of all blocks, rank]`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterBlocks {
    /// The modules, in the order of their outputs.
    pub blocks: Vec<AdapterBlock>,
    /// Columns of a block.
    pub rank: usize,
    /// Columns of the block-diagonal matrix.
    pub width: usize,
    /// What the stacked matrix is multiplied by: alpha / rank.
    pub scale: f32,
}

impl AdapterBlocks {
    /// Numbers of the stacked matrix.
    pub fn stacked(&self) -> usize {
        self.blocks.iter().map(|block| block.outputs * self.rank).sum()
    }
}
