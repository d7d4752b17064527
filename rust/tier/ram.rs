//! State in host memory, stepped in place: it is in the tensors themselves, always.

use super::{Run, Stored, Tier};
use crate::{
    adam::{batch::in_place, tensor::AdamTensor},
    error::Result,
    state::chunk::Chunk,
    stream::view::Route,
};

/// See the [module](self).
#[derive(Clone, Copy, Debug)]
pub struct Ram;

// SAFETY: a chunk's route is the chunk of the tensor itself, whose memory the submit's caller
// lends.
unsafe impl Tier for Ram {
    fn fetch(&self, _: &Run) -> Result<()> {
        Ok(())
    }

    fn route(&self, tensor: &AdamTensor, chunk: Chunk) -> AdamTensor<Route> {
        in_place(&tensor.chunk(chunk.index))
    }

    fn store(&self, _: &Run) -> Result<Stored> {
        Ok(Stored::Final)
    }

    fn commit(&self) -> Result<()> {
        Ok(())
    }
}
