//! Uploads: when new weights may be written on the device, and what waits for them.
//!
//! - UP-1 Uploads of a step come after what the caller's stream held when the step was submitted.
//! - UP-2 A segment is uploaded once its new state is final: as soon as it is stepped where its
//!   tier says so, else after the tier's commit.
//!   A weight of a deferred turn lands with the next job: new weights are written between a
//!   backward and the next forward only.
//! - UP-3 A segment is *enqueued* once the device has its upload and its event is recorded. Only
//!   from then on does the event stand for this upload. A thread that has a stream wait for a
//!   weight waits for that first.
//! - UP-4 Where checksums are kept, that of a segment is of what the device has of it since the
//!   engine wrote it last: it is taken on the lane behind the upload, before the segment's event,
//!   or behind the kernel that steps selected channels, on its stream. So a weight with another
//!   checksum was written by something else.

use std::ops::Range;

use super::{job::Update, segment::Segments};
use crate::{
    device::{Behind, CHECKSUM_SUMS, Channels, Device, Lane, Stream},
    error::Result,
    stream::view::View,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// See the [module](self).
pub(super) struct Uploads {
    device: Arc<dyn Device>,
    /// One event per segment, and one for all of a step.
    first_event: usize,
    /// For each segment: its upload of the last step is enqueued, or it had no part in that step.
    enqueued: Box<[AtomicBool]>,
    /// Where the device has a checksum of each segment; 0: none are kept.
    checksums: AtomicU64,
}

impl Uploads {
    /// Nothing is under way. Events from `first_event` on are their own.
    pub(super) fn new(device: Arc<dyn Device>, segments: &Segments, first_event: usize) -> Self {
        let enqueued = (0..segments.count()).map(|_| AtomicBool::new(true)).collect();
        Self { device, first_event, enqueued, checksums: AtomicU64::new(0) }
    }

    /// How many events they have.
    pub(super) fn events(segments: &Segments) -> usize {
        segments.count() + 1
    }

    /// Keeps checksums of segments from now on, at this address of the device.
    pub(super) fn keep_checksums(&self, address: u64) {
        self.checksums.store(address, Ordering::Relaxed);
    }

    /// Takes the checksum of a segment's weight on the device, where checksums are kept.
    ///
    /// # Safety
    /// As [`Device::checksums`] asks of the segment's weight.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where the device has failed.
    pub(super) unsafe fn take_checksum(
        &self,
        segments: &Segments,
        update: &Update,
        segment: usize,
        behind: Behind,
    ) -> Result<()> {
        let checksums = self.checksums.load(Ordering::Relaxed);
        let Some(weight) = update.weight.filter(|_| checksums != 0) else { return Ok(()) };
        let size = update.tensor.weight().dtype().size();
        let piece = segments.piece(update.index, segment, weight, size);
        // SAFETY: passed on from the caller, and the caller of `keep_checksums` vouches for those.
        unsafe { self.device.checksums(behind, &[piece], checksums_of(checksums, segment)) }
    }

    /// What is uploaded from now on comes after what `stream` holds now.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where the device has failed.
    pub(super) fn order_after(&self, stream: Stream) -> Result<()> {
        self.device.order_lane_after(Lane::Upload, self.device.mark(stream)?)
    }

    /// New weights of these segments are to come.
    pub(super) fn expect(&self, segments: Range<usize>) {
        self.enqueued[segments].iter().for_each(|one| one.store(false, Ordering::Relaxed));
    }

    /// Whether all of these segments are enqueued.
    pub(super) fn are_enqueued(&self, segments: Range<usize>) -> bool {
        self.enqueued[segments].iter().all(|one| one.load(Ordering::Acquire))
    }

    /// Enqueues the upload of a segment: of the host's own weight, or of the `predicted` one. The
    /// weights of its `selected` channels are written from their masters behind it. Where its
    /// weight stays in host memory nothing goes up, and what waits for it waits for its step
    /// only.
    ///
    /// # Safety
    /// Until the upload has ended, both sides are alive, nothing writes the host side, and nothing
    /// else uses the other.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where the device has failed.
    pub(super) unsafe fn enqueue(
        &self,
        segments: &Segments,
        update: &Update,
        segment: usize,
        predicted: Option<View>,
        selected: Option<Channels>,
    ) -> Result<()> {
        if let Some(target) = update.weight {
            let weight = update.tensor.weight();
            let elements = segments.elements(update.index, segment);
            let offset = elements.start * weight.dtype().size();
            let from = predicted.unwrap_or_else(|| weight.part(elements));
            let host = std::ptr::with_exposed_provenance_mut::<u8>(from.address());
            // SAFETY: passed on from the caller; the segment lies within both sides.
            unsafe {
                self.device.copy(Lane::Upload, target + offset as u64, host, from.nbytes())?;
            }
        }
        if let Some(channels) = selected {
            // SAFETY: passed on from the caller: they are a part of the segment.
            unsafe { self.device.restore_weights(&channels)? };
        }
        // SAFETY: passed on from the caller.
        unsafe { self.take_checksum(segments, update, segment, Behind::Uploads)? };
        self.device.record(Lane::Upload, self.first_event + segment)?;
        self.enqueued[segment].store(true, Ordering::Release);
        Ok(())
    }

    /// All segments of a step are enqueued.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where the device has failed.
    pub(super) fn close(&self) -> Result<()> {
        self.device.record(Lane::Upload, self.whole_event())
    }

    /// Waits until all uploads of the step that was closed last have ended.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where the device has failed.
    pub(super) fn wait(&self) -> Result<()> {
        self.device.wait(self.whole_event())
    }

    /// Waits until the last upload of a segment, which is enqueued, has ended.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where the device has failed.
    pub(super) fn wait_for(&self, segment: usize) -> Result<()> {
        self.device.wait(self.first_event + segment)
    }

    /// `stream` waits for the uploads of these segments, which are enqueued.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where the device has failed.
    pub(super) fn order_stream(&self, stream: Stream, mut segments: Range<usize>) -> Result<()> {
        segments.try_for_each(|segment| {
            self.device.order_stream_after(stream, self.first_event + segment)
        })
    }

    /// `stream` waits for all uploads of the step that was closed last.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where the device has failed.
    pub(super) fn order_stream_after_all(&self, stream: Stream) -> Result<()> {
        self.device.order_stream_after(stream, self.whole_event())
    }

    fn whole_event(&self) -> usize {
        self.first_event + self.enqueued.len()
    }
}

/// Where the checksum of a segment is, of those at `checksums`.
pub(super) fn checksums_of(checksums: u64, segment: usize) -> u64 {
    checksums + (segment * CHECKSUM_SUMS * size_of::<u64>()) as u64
}
