//! Chunks: the one unit of work. A chunk never crosses a parameter.

use std::ops::Range;

/// Elements of a chunk: what a worker takes, what a fingerprint covers, what one record of a
/// volume holds.
pub const CHUNK_LEN: usize = 1 << 16;

/// Chunks of a parameter of `numel` elements; the last may be shorter.
#[must_use]
pub fn num_chunks(numel: usize) -> usize {
    numel.div_ceil(CHUNK_LEN)
}

/// The `index`-th chunk of the `tensor`-th tensor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which tensor.
    pub tensor: usize,
    /// Which of its chunks.
    pub index: usize,
}

impl Chunk {
    /// All chunks of tensors of these sizes, in order.
    pub fn all(numels: impl Iterator<Item = usize>) -> Vec<Self> {
        let of_tensor =
            |(tensor, numel)| (0..num_chunks(numel)).map(move |index| Self { tensor, index });
        numels.enumerate().flat_map(of_tensor).collect()
    }

    /// Its elements within a tensor of `numel`.
    #[must_use]
    pub fn range(self, numel: usize) -> Range<usize> {
        self.index * CHUNK_LEN..((self.index + 1) * CHUNK_LEN).min(numel)
    }
}
