//! The groups of segments that have their turns together.
//!
//! Segments are dealt into as many groups as a turn comes round in steps. In each deferred step one
//! group has its turn, so the load of every step is the same.

use super::segment::Segments;
use crate::{
    adam::through::GRADS_MAX,
    error::{Error, Result},
    stream::element::Dtype,
};

/// The most steps between two turns of a segment.
pub const INTERVAL_MAX: usize = GRADS_MAX;

/// Of every segment's place: what the widest vectors and the device's copies like.
pub(super) const ALIGN_BYTES: usize = 64;

/// Where a segment's gradient is within the shares of its group.
#[derive(Clone, Copy, Debug)]
struct Place {
    group: usize,
    offset: usize,
}

/// See the [module](self).
pub(super) struct Groups {
    interval: usize,
    places: Box<[Place]>,
    share_nbytes: usize,
}

impl Groups {
    /// Deals the segments out in forward order, each to the group with the fewest bytes: groups
    /// are of about one size, and each has its part of every layer.
    ///
    /// # Errors
    /// [`Error::Value`] for an interval out of range, or other than one dtype per tensor.
    pub(super) fn new(segments: &Segments, dtypes: &[Dtype], interval: usize) -> Result<Self> {
        if !(1..=INTERVAL_MAX).contains(&interval) {
            return Err(Error::value(format!(
                "interval is `{interval}`, expected 1 to {INTERVAL_MAX}"
            )));
        }
        if dtypes.len() != segments.tensors() {
            return Err(Error::value(format!(
                "dtypes has `{}` entries, expected one for each of {} tensors",
                dtypes.len(),
                segments.tensors()
            )));
        }
        let mut filled = [0; INTERVAL_MAX];
        let filled = &mut filled[..interval];
        let mut places = Vec::with_capacity(segments.count());
        for (tensor, dtype) in dtypes.iter().enumerate() {
            for segment in segments.of(tensor) {
                let nbytes = segments.elements(tensor, segment).len() * dtype.size();
                let group = (0..interval).min_by_key(|&group| filled[group]).unwrap_or(0);
                places.push(Place { group, offset: filled[group] });
                filled[group] += nbytes.next_multiple_of(ALIGN_BYTES);
            }
        }
        let share_nbytes = filled.iter().copied().max().unwrap_or(0);
        Ok(Self { interval, places: places.into(), share_nbytes })
    }

    /// How many shares the ring has for them.
    pub(super) fn shares(&self) -> usize {
        self.interval * (self.interval + 1) / 2 + self.interval
    }

    /// Bytes of the gradients of the largest group.
    pub(super) fn share_nbytes(&self) -> usize {
        self.share_nbytes
    }

    /// The group of a segment.
    pub(super) fn of(&self, segment: usize) -> usize {
        self.places[segment].group
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.interval
    }

    /// Where a segment's bytes begin within a share.
    pub(super) fn offset(&self, segment: usize) -> usize {
        self.places[segment].offset
    }
}
