//! Selected channels: rows or columns that the device steps at once, ahead of the host.
//!
//! The host has all state, and applies every gradient in the turn of its segment, with or without a
//! selection. Of the channels that are selected the device has a copy of the state, to which it
//! applies every gradient in the job that brings it. With fp32 moments both have the same bits once
//! they have applied the same gradients ([`crate::adam::selected`]). So the copy is never brought
//! back: it is what the host will have, a few jobs early, and is dropped where that is no use any
//! more. With coded moments it *parts* from the host, by what the codes round away. It is dropped
//! all the same: the state is the host's, with the bits that it has without a selection.
//!
//! ```text
//! caller's stream   backward | step of selected channels | mark | next forward
//! upload lane                                               '-> landings, each followed by the
//!                                                                weights of selected channels
//! ```
//!
//! - SELD-1 A copy begins behind the pass of a job over its segment, when the host has applied
//!   every gradient that there is of the segment, with the bits of the host's state. From the next
//!   job on the device steps it with every gradient of its tensor.
//! - SELD-2 The device steps on the caller's stream, before the mark that the uploads of the job
//!   come after, and after all uploads of the job before. So in every job a landing finds the new
//!   masters. It writes all of a segment, and the weights of selected channels are written from
//!   their masters directly behind it, on its lane. What waits for the landing waits for both. So
//!   nothing sees an older weight of a selected channel, and prediction never reaches one.
//! - SELD-3 Where a segment lands with all updates (an exact step, a settle, a tensor that is
//!   stepped at once) its copy is dropped, before that: the host's weight is the same, or, where
//!   the copy has parted, the one that counts.
//! - SELD-4 Other code writes parameters and state on the host's side. An exact step comes after
//!   that, and drops the copies.
//! - SELD-5 A copy that may have parted gives the device another weight than the host's. Like a
//!   predicted one, that is followed by the host's own: with what SELD-3 names, and where a turn
//!   comes with nothing to apply. There the same channels are copied anew, since the tensor may get
//!   no gradient for long, and nothing of it is held for jobs then.
//!
//! A copy that has parted lasts until its channels are chosen anew, and not until the next turn. To
//! send it in every turn takes `12 fraction / interval` bytes per parameter and job, behind the
//! pass, where new weights take `2 / interval`.
//!
//! Memory: on the device 12 B per selected parameter and 4 B per channel; an eighth of what the
//! largest group of segments takes of it in host memory, through which copies are sent
//! ([`super::selection`]), and 4 B more per channel.

use std::ops::Range;

use super::{
    groups::Groups,
    job::Update,
    segment::Segments,
    selection::{ALIGN_BYTES, Plans, Selectable, Selection},
};
use crate::{
    adam::{
        Step,
        selected::{ChannelState, Shape, WeightKind, keeps_bits, read},
        tensor::AdamTensor,
    },
    device::{Channels, Device, Lane, Stream, by_step},
    error::{Error, Result},
    host::pool::Pool,
    simd::isa::Isa,
    stream::{element::Dtype, view::View},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A new selection of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which segment of the engine.
    pub segment: usize,
    /// Whether its channels are columns.
    pub by_columns: bool,
    /// Its channels within the block, ascending.
    pub indices: Vec<u32>,
}

/// What a job does on the device beside its uploads.
#[derive(Debug, Default)]
pub struct OnDevice<'a> {
    /// For each update the address of its gradient in device memory, whole and contiguous; empty
    /// where no channel is selected. It stays as it is until what the stream holds is done.
    pub grads: &'a [u64],
    /// Selections that begin with the job, behind its pass: of segments whose turn it is, or of
    /// any where it is whole.
    pub changes: Vec<Change>,
}

/// The selection of a segment, of which the device has a copy.
#[derive(Clone)]
struct Held {
    change: Change,
    /// Whether the copy keeps the bits of the host.
    keeps_bits: bool,
}

struct State {
    held: Vec<Option<Held>>,
    /// Of the job that was submitted last.
    changes: Vec<Change>,
}

/// See the [module](self).
pub(super) struct Selected {
    plans: Plans,
    device: u64,
    staging: View,
    /// On the upload lane: the staging has been sent.
    event: usize,
    state: Mutex<State>,
}

impl Selected {
    /// How many events one has.
    pub(super) const EVENTS: usize = 1;

    /// Nothing is selected. The event is its own.
    ///
    /// # Errors
    /// As [`selection_nbytes`], and for memory of another size.
    pub(super) fn new(
        segments: &Segments,
        groups: &Groups,
        selection: &Selection<'_>,
        event: usize,
    ) -> Result<Self> {
        let Selection { row_lens, fraction, device, staging } = *selection;
        let plans = Plans::new(segments, groups, row_lens, fraction)?;
        staging.expect("staging", &[Dtype::Uint8], plans.staging_nbytes)?;
        if plans.device_nbytes > 0 && !(device as usize).is_multiple_of(ALIGN_BYTES) {
            return Err(Error::value(format!(
                "the address of selected channels is `{device:#x}`, expected a multiple of \
                 {ALIGN_BYTES}"
            )));
        }
        let held = vec![None; segments.count()];
        let state = Mutex::new(State { held, changes: Vec::new() });
        Ok(Self { plans, device, staging, event, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The segments of which channels may be selected.
    pub(super) fn selectable(&self) -> impl Iterator<Item = Selectable> {
        self.plans.of_segments.iter().flatten().copied()
    }

    /// How many channels of a segment are selected; None: none of it can be.
    fn shape(&self, change: &Change) -> Option<Shape> {
        let one = (*self.plans.of_segments.get(change.segment)?)?;
        Some(one.shape_of(change.by_columns, change.indices.len()))
    }

    /// Whether the channels of a selection are those of its segment, ascending, and have room.
    fn is_sound(&self, change: &Change) -> bool {
        let one = self.plans.of_segments.get(change.segment).copied().flatten();
        one.is_some_and(|one| {
            let limit = if change.by_columns { one.row_len } else { one.rows };
            !change.indices.is_empty()
                && change.indices.is_sorted_by(|a, b| a < b)
                && change.indices.iter().all(|&index| (index as usize) < limit)
                && (one.column_count > 0 || !change.by_columns)
                && one.shape_of(change.by_columns, change.indices.len()).nbytes() <= one.nbytes()
        })
    }

    /// Drops all copies.
    pub(super) fn drop_all(&self) {
        self.state().held.fill(None);
    }

    /// Drops the copies of these segments.
    pub(super) fn drop_of(&self, segments: Range<usize>) {
        self.state().held[segments].fill(None);
    }

    /// Whether the device has a copy of a segment that may have parted from the host.
    pub(super) fn has_parted(&self, segment: usize) -> bool {
        self.state().held[segment].as_ref().is_some_and(|held| !held.keeps_bits)
    }

    /// The host's own weight of a segment lands with the job, which has no gradient of it. Where
    /// its copy may have parted, that is made anew with the job.
    pub(super) fn renew(&self, segment: usize) {
        let State { held, changes, .. } = &mut *self.state();
        changes.extend(held[segment].take_if(|held| !held.keeps_bits).map(|held| held.change));
    }

    /// All that can be wrong with a job's calls.
    ///
    /// # Errors
    /// [`Error::Value`] naming it.
    pub(super) fn check(
        &self,
        segments: &Segments,
        updates: &[Update],
        work: &OnDevice<'_>,
        may_change: impl Fn(&Selectable) -> bool,
    ) -> Result<()> {
        let has_grads = work.grads.len() == updates.len();
        let state = self.state();
        for update in updates {
            let of_tensor = segments.of(update.index);
            let is_selected = of_tensor.clone().any(|segment| state.held[segment].is_some());
            let gets_one = work.changes.iter().any(|change| of_tensor.contains(&change.segment));
            if !is_selected && !gets_one {
                continue;
            }
            if is_selected && !has_grads {
                return Err(Error::value(format!(
                    "grads has `{}` entries for {} updates, expected the gradient on the device of \
                     each",
                    work.grads.len(),
                    updates.len()
                )));
            }
            WeightKind::of(&update.tensor)?;
            if update.weight.is_none() {
                return Err(Error::value(format!(
                    "tensor `{}` has its weight in host memory, expected one on the device",
                    update.index
                )));
            }
        }
        let comes_early = |change: &&Change| {
            let one = self.plans.of_segments.get(change.segment).copied().flatten();
            one.is_some_and(|one| !may_change(&one))
        };
        if let Some(change) = work.changes.iter().find(comes_early) {
            return Err(Error::value(format!(
                "channels of segment `{}` are selected, expected a segment whose turn it is and \
                 whose tensor is stepped",
                change.segment
            )));
        }
        if work.changes.iter().all(|change| self.is_sound(change)) {
            return Ok(());
        }
        let counts = work.changes.iter().map(|change| (change.segment, change.indices.len()));
        Err(Error::value(format!(
            "of segments so many channels are selected: `{:?}`, expected distinct ones, ascending, \
             that have room in the memory for them",
            counts.collect::<Vec<_>>()
        )))
    }

    /// The channels of a segment as the device sees them; None: none is selected.
    ///
    /// # Errors
    /// As [`WeightKind::of`].
    fn channels(&self, state: &State, update: &Update, segment: usize) -> Result<Option<Channels>> {
        let Some(held) = &state.held[segment] else { return Ok(None) };
        let (Some(one), Some(shape), Some(weight)) =
            (self.plans.of_segments[segment], self.shape(&held.change), update.weight)
        else {
            return Ok(None);
        };
        let kind = WeightKind::of(&update.tensor)?;
        Ok(Some(Channels {
            shape,
            kind,
            weight: weight + (one.first * kind.dtype().size()) as u64,
            state: self.device + one.offset as u64,
            // Uploads write weights too: predicted ones, for one.
            follows_weight: false,
        }))
    }

    /// As the device sees them, of a segment that lands; None: none is selected.
    ///
    /// # Errors
    /// As [`WeightKind::of`].
    pub(super) fn landing(&self, update: &Update, segment: usize) -> Result<Option<Channels>> {
        self.channels(&self.state(), update, segment)
    }

    /// Steps what is selected of these updates, on `stream`, and takes the changes of the job,
    /// which have been checked. Nothing is selected where it is whole. Returns which segments it
    /// has stepped, and of which update each is.
    ///
    /// # Safety
    /// As [`Device::step_channels`].
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed: then some are stepped, and some are not.
    pub(super) unsafe fn step(
        &self,
        device: &dyn Device,
        segments: &Segments,
        updates: &[Update],
        work: OnDevice<'_>,
        stream: Stream,
    ) -> Result<Vec<(usize, usize)>> {
        let mut state = self.state();
        let (mut stepped, mut found) = (Vec::new(), Vec::new());
        for (at, (update, &grad)) in updates.iter().zip(work.grads).enumerate() {
            let step = Step::new(&update.hyper, update.count);
            for segment in segments.of(update.index) {
                let Some(channels) = self.channels(&state, update, segment)? else { continue };
                let begin = self.plans.of_segments[segment].map_or(0, |one| one.first);
                let block = (channels, grad + (begin * channels.kind.dtype().size()) as u64);
                stepped.push((step, block));
                found.push((segment, at));
            }
        }
        for (step, blocks) in &by_step(stepped.into_iter()) {
            // SAFETY: passed on from the caller; the state is this engine's, and nothing else is
            // under way with it: the stream comes after all uploads of the job before. Weights of
            // different segments are apart, which the caller vouches for, and so are their places.
            unsafe { device.step_channels(stream, blocks, step)? };
        }
        state.changes = work.changes;
        Ok(found)
    }

    /// The changes of the job that was submitted last; there are none any more.
    pub(super) fn take_changes(&self) -> Vec<Change> {
        std::mem::take(&mut self.state().changes)
    }

    /// Sends the host's state of new selections to the device, in fp32, in rounds of as much as the
    /// staging holds. Returns how many bytes.
    ///
    /// # Safety
    /// Nothing writes the state of their segments meanwhile.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed.
    pub(super) unsafe fn pick_up(
        &self,
        picking: &Picking<'_>,
        mut changes: Vec<Change>,
    ) -> Result<u64> {
        let Picking { device, pool, isa, tensor_of } = *picking;
        changes.sort_by_key(|change| change.segment);
        let mut nbytes = 0;
        for (number, round) in self.rounds(&changes).iter().enumerate() {
            if number > 0 {
                device.wait(self.event)?;
            }
            let failure = Mutex::new(None);
            let gather = |sent: &Sent<'_>| -> Result<()> {
                let tensor = tensor_of(sent.one.tensor)?.without_fingerprints();
                let block = (&tensor, sent.one.first);
                let (state, indices) = ChannelState::within(self.staged(sent), &sent.shape);
                // SAFETY: passed on from the caller; the staging is this engine's, no copy from it
                // is under way, and what a round sends has disjoint places in it.
                unsafe {
                    read(isa, block, (&sent.shape, &sent.change.indices), &state);
                    let indices = indices.slice_mut::<u32>(0..sent.shape.count);
                    indices.copy_from_slice(&sent.change.indices);
                }
                Ok(())
            };
            pool.run(round.len(), &|number| {
                if let Err(error) = gather(&round[number]) {
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            });
            failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)?;
            for sent in round {
                let host = std::ptr::with_exposed_provenance_mut(self.staged(sent).address());
                let to = self.device + sent.one.offset as u64;
                let size = sent.shape.nbytes();
                // SAFETY: both sides hold what a segment takes at most. What used the copy before,
                // the step of this job and the landing, comes before it: the lane is ordered after
                // the one, and has the other.
                unsafe { device.copy(Lane::Upload, to, host, size)? };
                nbytes += size as u64;
            }
            device.record(Lane::Upload, self.event)?;
        }
        for change in changes {
            let Some(one) = self.plans.of_segments[change.segment] else { continue };
            let keeps_bits = keeps_bits(&tensor_of(one.tensor)?);
            let segment = change.segment;
            self.state().held[segment] = Some(Held { change, keeps_bits });
        }
        Ok(nbytes)
    }

    /// What is sent together: as much each time as the staging holds.
    fn rounds<'a>(&self, changes: &'a [Change]) -> Vec<Vec<Sent<'a>>> {
        let mut rounds = vec![Vec::new()];
        let mut staged_nbytes = 0;
        for change in changes {
            let Some(one) = self.plans.of_segments[change.segment] else { continue };
            let shape = one.shape_of(change.by_columns, change.indices.len());
            let nbytes = shape.nbytes().next_multiple_of(ALIGN_BYTES);
            if staged_nbytes + nbytes > self.plans.staging_nbytes {
                rounds.push(Vec::new());
                staged_nbytes = 0;
            }
            let last = rounds.len() - 1;
            rounds[last].push(Sent { change, one, shape, staged: staged_nbytes });
            staged_nbytes += nbytes;
        }
        rounds
    }

    /// Where in the staging a selection is.
    fn staged(&self, sent: &Sent<'_>) -> View {
        self.staging.part(sent.staged..sent.staged + sent.shape.nbytes())
    }
}

/// A selection that begins, on its way to the device.
struct Sent<'a> {
    change: &'a Change,
    one: Selectable,
    shape: Shape,
    /// Where its part of the staging begins.
    staged: usize,
}

/// What it takes to send state.
#[derive(Clone, Copy)]
pub(super) struct Picking<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) pool: &'a Pool,
    pub(super) isa: Isa,
    /// A tensor, in its home.
    pub(super) tensor_of: &'a (dyn Fn(usize) -> Result<AdamTensor> + Sync),
}
