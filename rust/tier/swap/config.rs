//! How a swap is made, and how many buffers keep its drives and workers busy.

use std::num::NonZeroU64;

use super::{
    super::volume::{Durability, Location, Options},
    chunks::Chunks,
};
use crate::{
    adam::tensor::AdamTensor,
    error::{Error, Result},
    stream::element::Dtype,
};

/// Bytes that each drive has in flight, each way: what keeps a fast one busy while the workers
/// turn to the next records.
const IN_FLIGHT_BYTES: usize = 8 << 20;

/// The largest block of a file system.
const BLOCK_BYTES_MAX: usize = 64 << 10;

/// How a swap is made.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which volume.
    pub location: Location,
    /// The bandwidth of each member, in any unit; empty where all are alike.
    pub weights: Vec<u32>,
    /// The most bytes of a record that lie together on one member.
    pub stripe_bytes: usize,
    /// What a step is after a crash.
    pub durability: Durability,
    /// Of what the tensors are, beside their sizes: a volume of another identity is not opened.
    pub identity: u64,
    /// What its commits say of the run that makes them: any number, the same for volumes that step
    /// together. One that is opened need not be of this run; its next commits are.
    pub run: u64,
    /// The tensors whose fp32 masters are packed beside their bf16 weights (SWAP-7), by number.
    pub packed: Vec<usize>,
    /// Bytes of host memory for the state of the first chunks.
    pub ram_nbytes: usize,
    /// The most bytes of buffers, unless a step could not go on with so few.
    pub buffers_nbytes_max: usize,
    /// Workers that step.
    pub workers: usize,
    /// Whether each step counts, also one that changes nothing here: so that the steps of several
    /// volumes have the same numbers.
    pub counts_each_step: bool,
    /// Steps from one commit to the next (SWAP-6), with [`Durability::Commit`].
    pub commit_interval: NonZeroU64,
    /// How the volume is used; the number of buffers is chosen here.
    pub options: Options,
}

impl Config {
    pub(super) fn chunks(&self, places: &[AdamTensor], durability: Durability) -> Chunks {
        Chunks::new(places, &self.packed, self.ram_nbytes, durability)
    }

    pub(super) fn check_packed(&self, places: &[AdamTensor]) -> Result<()> {
        for &tensor in &self.packed {
            let layout = places.get(tensor).map(AdamTensor::layout);
            if layout.and_then(|layout| layout.weight_out) != Some(Dtype::BFloat16) {
                return Err(Error::value(format!(
                    "the master of tensor `{tensor}` is to be packed, expected an fp32 one with a \
                     bfloat16 weight"
                )));
            }
        }
        Ok(())
    }

    pub(super) fn steps_per_commit(&self) -> NonZeroU64 {
        match self.durability {
            Durability::None => NonZeroU64::MIN,
            Durability::Commit => self.commit_interval,
        }
    }

    pub(super) fn options(&self, chunks: &Chunks) -> Options {
        let num_buffers = self.num_buffers(&chunks.record_nbytes()).0;
        Options { num_buffers, ..self.options.clone() }
    }

    /// How many buffers of the largest of these records keep drives and workers busy, and the bytes
    /// of each, at most.
    fn num_buffers(&self, sizes: &[usize]) -> (usize, usize) {
        let largest = sizes.iter().copied().max().unwrap_or(0);
        // A trailer beside each, in whole blocks: those of a file system may be larger than a page.
        let stored = (largest + 64).next_multiple_of(BLOCK_BYTES_MAX);
        let per_chunk = match self.durability {
            Durability::None => 1,
            Durability::Commit => 2,
        };
        let in_flight = 2 * self.location.drives.len() * IN_FLIGHT_BYTES.div_ceil(stored);
        let wanted = (in_flight + 2 * per_chunk * self.workers)
            // Those that are written, and those that are read ahead.
            .min(2 * sizes.len())
            .min(self.buffers_nbytes_max / stored)
            .min(usize::from(u16::MAX));
        (wanted.max(per_chunk), stored)
    }

    /// Bytes of the buffers of a swap of these places, at most.
    #[must_use]
    pub fn buffers_nbytes(&self, places: &[AdamTensor]) -> usize {
        let none_in_ram = Self { ram_nbytes: 0, ..self.clone() };
        let (num, nbytes) =
            self.num_buffers(&none_in_ram.chunks(places, self.durability).record_nbytes());
        num * nbytes
    }
}
