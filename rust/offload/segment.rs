//! Segments: runs of chunks of one tensor, the unit of what crosses the bus and of what a forward
//! waits for.

use std::ops::Range;

use crate::{
    device::Piece,
    error::{Error, Result},
    state::chunk::{CHUNK_LEN, num_chunks},
};

/// Chunks of a segment: 4 Mi elements, 8 MB of bf16, 0.15 ms of a PCIe 5 bus and about 1 ms of
/// stepping. Larger ones make the first chunk wait longer, smaller ones cost more calls.
const CHUNKS: usize = 64;

/// Elements of a segment, but for a tensor's last.
pub const SEGMENT_LEN: usize = CHUNKS * CHUNK_LEN;

/// The segments of a fixed list of tensors, numbered through.
pub(super) struct Segments {
    numels: Box<[usize]>,
    /// For each tensor the number of its first segment, and one more for the end.
    first: Box<[usize]>,
}

impl Segments {
    pub(super) fn new(numels: &[usize]) -> Self {
        let mut first = vec![0];
        for numel in numels {
            first.push(first[first.len() - 1] + numel.div_ceil(SEGMENT_LEN));
        }
        Self { numels: numels.into(), first: first.into() }
    }

    /// Checks that there is such a tensor.
    ///
    /// # Errors
    /// [`Error::Value`] where there is not.
    pub(super) fn check_tensor(&self, tensor: usize) -> Result<()> {
        if tensor < self.tensors() {
            return Ok(());
        }
        Err(Error::value(format!(
            "tensor `{tensor}`, expected one of the engine's {}",
            self.tensors()
        )))
    }

    /// Checks that a tensor has these elements.
    ///
    /// # Errors
    /// [`Error::Value`] where it does not, or there is no such tensor.
    pub(super) fn check_elements(&self, tensor: usize, elements: &Range<usize>) -> Result<()> {
        self.check_tensor(tensor)?;
        let numel = self.numel(tensor);
        if elements.start <= elements.end && elements.end <= numel {
            return Ok(());
        }
        Err(Error::value(format!(
            "elements `{}..{}` of a tensor of {numel}, expected a range within it",
            elements.start, elements.end
        )))
    }

    /// How many tensors there are.
    pub(super) fn tensors(&self) -> usize {
        self.numels.len()
    }

    /// Elements of a tensor.
    pub(super) fn numel(&self, tensor: usize) -> usize {
        self.numels[tensor]
    }

    /// For each tensor the number of its first segment, and one more for the end.
    pub(super) fn first(&self) -> &[usize] {
        &self.first
    }

    /// How many segments all tensors have.
    pub(super) fn count(&self) -> usize {
        self.first[self.numels.len()]
    }

    /// The segments of a tensor.
    pub(super) fn of(&self, tensor: usize) -> Range<usize> {
        self.first[tensor]..self.first[tensor + 1]
    }

    /// The segments that hold the elements `range` of a tensor.
    pub(super) fn holding(&self, tensor: usize, range: &Range<usize>) -> Range<usize> {
        let first = self.first[tensor];
        if range.is_empty() {
            first..first
        } else {
            first + range.start / SEGMENT_LEN..first + range.end.div_ceil(SEGMENT_LEN)
        }
    }

    /// The elements of segment number `segment` within `tensor`, which has it.
    pub(super) fn elements(&self, tensor: usize, segment: usize) -> Range<usize> {
        let begin = (segment - self.first[tensor]) * SEGMENT_LEN;
        begin..(begin + SEGMENT_LEN).min(self.numels[tensor])
    }

    /// The memory of segment number `segment` within `tensor`, which has it, where the tensor
    /// begins at `address` and its elements have `size` bytes.
    pub(super) fn piece(&self, tensor: usize, segment: usize, address: u64, size: usize) -> Piece {
        let elements = self.elements(tensor, segment);
        Piece::new(address + (elements.start * size) as u64, elements.len() * size)
    }

    /// The chunks of segment number `segment` within `tensor`.
    pub(super) fn chunks(&self, tensor: usize, segment: usize) -> Range<usize> {
        let begin = (segment - self.first[tensor]) * CHUNKS;
        begin..(begin + CHUNKS).min(num_chunks(self.numels[tensor]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_every_tensor_once() {
        let numels = [0, 1, SEGMENT_LEN, SEGMENT_LEN + 1, 3 * SEGMENT_LEN - 1, 0, CHUNK_LEN];
        let segments = Segments::new(&numels);
        assert_eq!(segments.tensors(), numels.len());
        assert_eq!(segments.count(), 1 + 1 + 2 + 3 + 1);
        let mut next = 0;
        for (tensor, numel) in numels.into_iter().enumerate() {
            let (mut element, mut chunk) = (0, 0);
            for segment in segments.of(tensor) {
                assert_eq!(segment, next);
                next += 1;
                let (elements, chunks) =
                    (segments.elements(tensor, segment), segments.chunks(tensor, segment));
                assert_eq!((elements.start, chunks.start), (element, chunk));
                assert_eq!(chunks.start * CHUNK_LEN, elements.start);
                (element, chunk) = (elements.end, chunks.end);
            }
            assert_eq!((element, chunk), (numel, num_chunks(numel)));
            assert_eq!(segments.holding(tensor, &(0..numel)), segments.of(tensor));
        }
        assert_eq!(segments.holding(4, &(SEGMENT_LEN - 1..SEGMENT_LEN + 1)).len(), 2);
        assert_eq!(segments.holding(4, &(SEGMENT_LEN..SEGMENT_LEN)).len(), 0);
    }
}
