//! The ring: host memory for gradients that wait for their segments' turns.
//!
//! A *share* is the memory for the gradients of one group of segments (`groups.rs`) of one step.
//! All shares have the size of the largest.
//!
//! ```text
//! group 0   . . . turn . . .      its shares: one per step, up to `interval`
//! group 1   turn . . . turn       freed, all at once, when its turn is over
//! ```
//!
//! - RING-1 A segment has one place within every share of its group.
//! - RING-2 A share belongs to the generation that is being filled, or to its group, or is free.
//! - RING-3 There is a share for whatever may be taken: the groups hold `interval * (interval + 1)
//!   / 2` at most, those in their turn included, and a generation that is being filled one each.
//!   The one that is stepped has handed over its own.
//!
//! Memory: `(interval + 1) / 2 + 1` gradients per element, to within the size of a segment.

use super::{
    groups::{ALIGN_BYTES, Groups, INTERVAL_MAX},
    segment::Segments,
    selection::Selection,
};
use crate::{
    error::{Error, Result},
    stream::{element::Dtype, view::View},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// What an engine needs for steps that are deferred.
#[derive(Clone, Copy, Debug)]
pub struct Deferral<'a> {
    /// Every how many deferred steps a segment has its turn: 1 to [`INTERVAL_MAX`].
    pub interval: usize,
    /// Of each tensor's gradient, and of its weight on the device.
    pub dtypes: &'a [Dtype],
    /// Memory for gradients, of [`deferral_nbytes`]; it outlives the engine.
    pub gradients: View,
    /// Memory for the weights that a turn predicts, of [`deferral_nbytes`]; None: none does.
    pub predicted: Option<View>,
    /// For channels that are stepped on the device; None: none is.
    pub selection: Option<Selection<'a>>,
}

/// Bytes of host memory for gradients that wait for their turns, and for predicted weights, of
/// tensors of so many elements.
///
/// # Errors
/// [`Error::Value`] for an interval out of range, or other than one dtype per tensor.
pub fn deferral_nbytes(
    numels: &[usize],
    dtypes: &[Dtype],
    interval: usize,
) -> Result<(usize, usize)> {
    let groups = Groups::new(&Segments::new(numels), dtypes, interval)?;
    Ok((groups.shares() * groups.share_nbytes(), groups.share_nbytes()))
}

/// The shares of one generation or group, by their numbers.
type Shares = [Option<usize>; INTERVAL_MAX];

#[derive(Default)]
struct Owned {
    free: Vec<usize>,
    /// For each generation, and each group, the share that is being filled.
    filled: [Shares; 2],
    /// For each group the shares that wait for its turn.
    waiting: [Vec<usize>; INTERVAL_MAX],
}

/// See the [module](self).
pub(super) struct Ring {
    pub(super) groups: Groups,
    dtypes: Box<[Dtype]>,
    gradients: View,
    predicted: Option<View>,
    owned: Mutex<Owned>,
}

impl Ring {
    /// With all shares free.
    ///
    /// # Errors
    /// As [`deferral_nbytes`], and for memory of another size.
    pub(super) fn new(segments: &Segments, deferral: &Deferral<'_>) -> Result<Self> {
        let Deferral { interval, dtypes, gradients, predicted, .. } = *deferral;
        let groups = Groups::new(segments, dtypes, interval)?;
        let shares = groups.shares();
        let expect = |name: &str, view: View, numel: usize| {
            view.expect(name, &[Dtype::Uint8], numel)?;
            if numel == 0 || view.address().is_multiple_of(ALIGN_BYTES) {
                return Ok(());
            }
            Err(Error::value(format!(
                "the address of {name} is `{:#x}`, expected a multiple of {ALIGN_BYTES}",
                view.address()
            )))
        };
        expect("gradients", gradients, shares * groups.share_nbytes())?;
        if let Some(predicted) = predicted {
            expect("predicted", predicted, groups.share_nbytes())?;
        }
        let owned = Owned {
            free: (0..shares).rev().collect(),
            waiting: std::array::from_fn(|_| Vec::with_capacity(interval)),
            ..Owned::default()
        };
        Ok(Self { groups, dtypes: dtypes.into(), gradients, predicted, owned: Mutex::new(owned) })
    }

    /// What a tensor's gradient is of.
    pub(super) fn dtype(&self, tensor: usize) -> Dtype {
        self.dtypes[tensor]
    }

    /// Has shares ready for these segments of a generation that is being filled.
    ///
    /// # Errors
    /// [`Error::Value`] where none is free: RING-3 says that one is.
    pub(super) fn reserve(
        &self,
        generation: usize,
        segments: impl IntoIterator<Item = usize>,
    ) -> Result<()> {
        let Owned { free, filled, .. } = &mut *self.owned();
        for segment in segments {
            let share = &mut filled[generation][self.groups.of(segment)];
            if share.is_none() {
                *share = Some(free.pop().ok_or_else(|| {
                    Error::value("no memory is left for deferred gradients, expected a free share")
                })?);
            }
        }
        Ok(())
    }

    /// Where the gradient of a segment goes, or is, in a generation that has a share for it.
    pub(super) fn gradient(
        &self,
        generation: usize,
        segments: &Segments,
        tensor: usize,
        segment: usize,
    ) -> Option<View> {
        let share = self.owned().filled[generation][self.groups.of(segment)]?;
        let begin = share * self.groups.share_nbytes();
        Some(self.view(self.gradients, begin, segments, tensor, segment))
    }

    /// As a view of all of the tensor's gradient, of which only the segment's elements are there:
    /// kernels take a chunk of it by the chunk's number.
    pub(super) fn whole_gradient(
        &self,
        generation: usize,
        segments: &Segments,
        tensor: usize,
        segment: usize,
    ) -> Option<View> {
        let view = self.gradient(generation, segments, tensor, segment)?;
        let before = segments.elements(tensor, segment).start * view.dtype().size();
        Some(view.widened(view.address().wrapping_sub(before), segments.numel(tensor)))
    }

    /// Where the predicted weight of a segment goes.
    pub(super) fn predicted(
        &self,
        segments: &Segments,
        tensor: usize,
        segment: usize,
    ) -> Option<View> {
        self.predicted.map(|memory| self.view(memory, 0, segments, tensor, segment))
    }

    /// Whether there is memory for predicted weights.
    pub(super) fn can_predict(&self) -> bool {
        self.predicted.is_some()
    }

    fn view(
        &self,
        memory: View,
        share_begin: usize,
        segments: &Segments,
        tensor: usize,
        segment: usize,
    ) -> View {
        let (dtype, numel) = (self.dtypes[tensor], segments.elements(tensor, segment).len());
        let begin = share_begin + self.groups.offset(segment);
        memory.part(begin..begin + numel * dtype.size()).cast(dtype)
    }

    /// The shares of a generation wait for the turns of their groups from now on.
    pub(super) fn keep(&self, generation: usize) {
        let Owned { filled, waiting, .. } = &mut *self.owned();
        for (share, waiting) in filled[generation].iter_mut().zip(waiting) {
            waiting.extend(share.take());
        }
    }

    /// The turn of these groups is over: nothing reads their gradients any more.
    pub(super) fn free(&self, groups: std::ops::Range<usize>) {
        let Owned { free, waiting, .. } = &mut *self.owned();
        waiting[groups].iter_mut().for_each(|shares| free.append(shares));
    }

    /// A generation is discarded. What is still copied to its shares comes before whatever is
    /// copied there later, since the lane keeps its order.
    pub(super) fn discard(&self, generation: usize) {
        let Owned { free, filled, .. } = &mut *self.owned();
        filled[generation].iter_mut().for_each(|share| free.extend(share.take()));
    }

    fn owned(&self) -> MutexGuard<'_, Owned> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
