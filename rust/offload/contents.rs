//! Contents of weights on the device: whether a program has written them since the engine did.
//!
//! The engine keeps a checksum of each segment as it was when its upload ended (UP-4 of
//! `uploads.rs`). A caller takes them again, behind all uploads, and compares. So a write counts
//! however it was made.
//!
//! Cost: two reads of the weights per step, of device memory. A checksum takes 2 KiB per segment;
//! Python has two of each.

use super::{engine::Engine, shared::Shared, uploads::checksums_of};
use crate::{
    device::{Attached, Behind, Piece, Stream},
    error::Result,
};

/// Where the weight of a tensor is on the device.
#[derive(Clone, Copy, Debug)]
pub struct Weight {
    /// Which tensor of the engine.
    pub index: usize,
    /// Where it begins.
    pub address: u64,
    /// Bytes of an element.
    pub size: usize,
}

impl Engine {
    /// Writes the checksums of memory of the device, one after the other to `sums`, in the order of
    /// `stream`; see [`Device::checksums`].
    ///
    /// # Safety
    /// As [`Device::checksums`] asks.
    ///
    /// # Errors
    /// [`Error::Os`] where the device cannot, or has no kernel for it.
    ///
    /// [`Device::checksums`]: crate::device::Device::checksums
    /// [`Error::Os`]: crate::error::Error::Os
    pub unsafe fn checksums(&self, memory: &[Piece], sums: u64, stream: Stream) -> Result<()> {
        self.check_process()?;
        self.shared.device.prepare_checksums()?;
        let _attached = Attached::to(&*self.shared.device)?;
        // SAFETY: passed on from the caller.
        unsafe { self.shared.device.checksums(Behind::Stream(stream), memory, sums) }
    }

    /// Keeps a checksum of each segment of weights on the device (UP-4), one after the other at
    /// this address of it.
    ///
    /// # Safety
    /// As [`Device::checksums`] asks of `sums`, as long as the engine lives.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has no kernel for it.
    ///
    /// [`Device::checksums`]: crate::device::Device::checksums
    /// [`Error::Os`]: crate::error::Error::Os
    pub unsafe fn keep_checksums(&self, sums: u64) -> Result<()> {
        self.check_process()?;
        self.shared.device.prepare_checksums()?;
        self.shared.uploads.keep_checksums(sums);
        Ok(())
    }

    /// Writes the checksums of weights to `sums`, as [`Engine::keep_checksums`] has them, in the
    /// order of `stream`. Those of other tensors are left as they are.
    ///
    /// # Safety
    /// As [`Device::checksums`] asks.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor that the engine does not have; [`Error::Os`] where the device
    /// has failed.
    ///
    /// [`Device::checksums`]: crate::device::Device::checksums
    /// [`Error::Os`]: crate::error::Error::Os
    /// [`Error::Value`]: crate::error::Error::Value
    pub unsafe fn weight_checksums(
        &self,
        weights: &[Weight],
        sums: u64,
        stream: Stream,
    ) -> Result<()> {
        let Shared { device, segments, .. } = &*self.shared;
        self.check_process()?;
        let _attached = Attached::to(&**device)?;
        let mut memory = Vec::new();
        // Of tensors whose segments follow each other there are as few launches as can be.
        let mut first = 0;
        let launch = |memory: &mut Vec<Piece>, first| {
            let found = std::mem::take(memory);
            // SAFETY: passed on from the caller.
            unsafe { device.checksums(Behind::Stream(stream), &found, checksums_of(sums, first)) }
        };
        for weight in weights {
            segments.check_tensor(weight.index)?;
            let own = segments.of(weight.index);
            if first + memory.len() != own.start {
                launch(&mut memory, first)?;
                first = own.start;
            }
            memory.extend(
                own.map(|one| segments.piece(weight.index, one, weight.address, weight.size)),
            );
        }
        launch(&mut memory, first)
    }

    /// For each tensor the number of its first segment, and one more for the end.
    #[must_use]
    pub fn first_segments(&self) -> &[usize] {
        self.shared.segments.first()
    }
}
