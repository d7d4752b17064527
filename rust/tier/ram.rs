//! State in host memory, stepped in place: it is in the tensors themselves, always.

use super::{Planned, Stored, Tier};
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
    fn begin(&self, _: &mut dyn Iterator<Item = Planned<'_>>) -> Result<()> {
        Ok(())
    }

    fn fetch(&self, tensor: &AdamTensor, chunk: Chunk) -> Result<AdamTensor<Route>> {
        Ok(in_place(&tensor.chunk(chunk.index)))
    }

    fn store(&self, _: &AdamTensor, _: Chunk) -> Result<Stored> {
        Ok(Stored::Final)
    }

    fn is_at_home(&self, _: usize) -> bool {
        true
    }

    fn commit(&self) -> Result<()> {
        Ok(())
    }
}
