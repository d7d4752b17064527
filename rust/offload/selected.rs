//! Selected channels: rows or columns that are stepped on the device, at once, in every job.
//!
//! A segment may have a selection: channels of the whole rows that lie in it. Their masters and
//! moments are on the device then, and what the host has of them is dead: its turns compute it, and
//! nothing uses it. Everything else of the segment is deferred as without.
//!
//! ```text
//! caller's stream   backward | step of selected channels | mark | next forward
//! upload lane                                               '-> landings, each followed by the
//!                                                                weights of selected channels
//! ```
//!
//! - SELD-1 One owner. The host has a channel's state up to the job in which the channel is picked
//!   up, the device from the job after it, and the host again from the job in which it is written
//!   back. Both happen behind the pass of that job over the segment, when the host has applied
//!   every gradient of the segment that there is. So each gradient is applied to it once: by the
//!   device where the job began with the channel selected, by the host where not.
//! - SELD-2 State moves as bits ([`crate::adam::selected`]).
//! - SELD-3 The device steps on the caller's stream, before the mark that the uploads of the job
//!   come after, and after all uploads of the job before. So in every job a landing finds the new
//!   masters. It writes all of a segment, and the weights of selected channels are written from
//!   their masters directly behind it, on its lane. Nothing sees what was there in between: what
//!   waits for the landing waits for both. Prediction so never reaches a selected channel.
//! - SELD-4 A selection ends where its segment lands now (an exact step, a tensor that is stepped
//!   at once, a settle), and in the first turn for which its tensor has no gradient: the memory of
//!   a tensor is lent as long as its gradients are pending, and a turn longer.
//! - SELD-5 A selection that was never stepped is *clean*: the host's state is whole. An exact step
//!   or a settle drops it without a look, since other code may have written the state meanwhile.
//!
//! Memory: on the device 12 B per selected parameter and 4 B per channel; as much host memory for
//! the largest group of segments, through which state moves.

use super::{
    job::Update,
    ring::Groups,
    segment::Segments,
    selection::{ALIGN_BYTES, Plan, Plans, Selectable, Selection},
};
use crate::{
    adam::{
        Step,
        exchange::take_fingerprint,
        selected::{ChannelState, Shape, WeightKind, read, write, write_weights},
        tensor::AdamTensor,
    },
    device::{Channels, Device, Lane, Stream},
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

/// The selection of a segment.
struct Held {
    by_columns: bool,
    indices: Vec<u32>,
    /// The device has stepped it: the host's state is dead.
    is_dirty: bool,
}

#[derive(Default)]
struct State {
    held: Vec<Option<Held>>,
    /// Of the job that was submitted last.
    changes: Vec<Change>,
}

/// A segment whose selection ends, or is exchanged for another.
#[derive(Clone, Copy)]
pub(super) struct Returning {
    pub(super) tensor: usize,
    pub(super) segment: usize,
    /// The weight of the segment that lands next, where that is not the host's own.
    pub(super) predicted: Option<View>,
    /// Whether the host's own weight lands with this job.
    pub(super) lands_now: bool,
}

/// See the [module](self).
pub(super) struct Selected {
    plans: Plans,
    device: u64,
    staging: View,
    /// On the download lane, and on the upload lane.
    events: [usize; 2],
    state: Mutex<State>,
}

impl Selected {
    /// How many events one has.
    pub(super) const EVENTS: usize = 2;

    /// Nothing is selected. Events from `first_event` on are its own.
    ///
    /// # Errors
    /// As [`selection_nbytes`], and for memory of another size.
    pub(super) fn new(
        segments: &Segments,
        groups: &Groups,
        selection: &Selection<'_>,
        first_event: usize,
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
        let held = (0..segments.count()).map(|_| None).collect();
        let state = Mutex::new(State { held, changes: Vec::new() });
        Ok(Self { plans, device, staging, events: [first_event, first_event + 1], state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The segments of which channels may be selected.
    pub(super) fn selectable(&self) -> impl Iterator<Item = Selectable> {
        self.plans.of_segments.iter().flatten().map(|plan| plan.selectable)
    }

    /// Whether a segment has a selection.
    pub(super) fn is_held(&self, segment: usize) -> bool {
        self.state().held[segment].is_some()
    }

    /// Whether the host's state of some of a segment is dead.
    pub(super) fn is_dirty(&self, segment: usize) -> bool {
        self.state().held[segment].as_ref().is_some_and(|held| held.is_dirty)
    }

    /// Whether the host's state of anything is dead.
    pub(super) fn is_any_dirty(&self) -> bool {
        self.state().held.iter().flatten().any(|held| held.is_dirty)
    }

    /// Drops what was never stepped on the device (SELD-5).
    pub(super) fn drop_clean(&self) {
        for held in &mut self.state().held {
            if held.as_ref().is_some_and(|held| !held.is_dirty) {
                *held = None;
            }
        }
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
        work.changes.iter().try_for_each(|change| {
            let plan = self.plans.of_segments.get(change.segment).copied().flatten();
            let fits = plan.is_some_and(|plan| {
                let shape = plan.selectable.shape(change.by_columns);
                let limit = if change.by_columns { shape.row_len } else { shape.rows };
                shape.count > 0
                    && change.indices.len() == shape.count
                    && change.indices.is_sorted_by(|a, b| a < b)
                    && change.indices.iter().all(|&index| (index as usize) < limit)
                    && may_change(&plan.selectable)
            });
            if fits {
                return Ok(());
            }
            Err(Error::value(format!(
                "`{}` channels of segment `{}` are selected, expected the stated number, \
                 ascending, of a segment whose turn it is and whose tensor is stepped",
                change.indices.len(),
                change.segment
            )))
        })
    }

    /// Where the channels of a segment are on the device; None: none is selected.
    fn channels(&self, held: &Held, update: &Update, plan: &Plan) -> Result<Option<Channels>> {
        let Some(weight) = update.weight else { return Ok(None) };
        let kind = WeightKind::of(&update.tensor)?;
        Ok(Some(Channels {
            shape: plan.selectable.shape(held.by_columns),
            kind,
            weight: weight + (plan.selectable.first * kind.dtype().size()) as u64,
            state: self.device + plan.offset as u64,
        }))
    }

    /// As the device sees them, of a segment that lands; None: none is selected.
    ///
    /// # Errors
    /// As [`WeightKind::of`].
    pub(super) fn landing(&self, update: &Update, segment: usize) -> Result<Option<Channels>> {
        match (&self.state().held[segment], &self.plans.of_segments[segment]) {
            (Some(held), Some(plan)) => self.channels(held, update, plan),
            _ => Ok(None),
        }
    }

    /// Steps what is selected of these updates, on `stream`, and takes the changes of the job.
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
    ) -> Result<()> {
        let State { held, changes } = &mut *self.state();
        for (update, &grad) in updates.iter().zip(work.grads) {
            let step = Step::new(&update.hyper, update.count);
            for segment in segments.of(update.index) {
                let (Some(held), Some(plan)) =
                    (&mut held[segment], &self.plans.of_segments[segment])
                else {
                    continue;
                };
                let Some(channels) = self.channels(held, update, plan)? else { continue };
                let first = plan.selectable.first * channels.kind.dtype().size();
                // The host's is dead from the first launch on.
                held.is_dirty = true;
                // SAFETY: passed on from the caller; the state is this engine's, and nothing else
                // is under way with it: the stream comes after all uploads of the job before.
                unsafe { device.step_channels(stream, &channels, grad + first as u64, &step)? };
            }
        }
        *changes = work.changes;
        Ok(())
    }

    /// The changes of the job that was submitted last; there are none any more.
    pub(super) fn take_changes(&self) -> Vec<Change> {
        std::mem::take(&mut self.state().changes)
    }

    /// Writes the state of selections that end back to the host, group by group; the host's pass
    /// over their segments is over. Returns how many bytes came.
    ///
    /// # Safety
    /// Nothing else uses the state of these segments, nor their predicted weights.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed.
    pub(super) unsafe fn write_back(
        &self,
        moving: &Moving<'_>,
        returning: &[Returning],
    ) -> Result<u64> {
        let mut nbytes = 0;
        for group in 0..moving.groups.count() {
            let in_group = |one: &&Returning| moving.groups.of(one.segment) == group;
            let of_group: Vec<_> = returning
                .iter()
                .filter(in_group)
                .filter_map(|one| {
                    let held = self.state().held[one.segment].take()?;
                    Some((one, held, self.plans.of_segments[one.segment]?))
                })
                .collect();
            if of_group.is_empty() {
                continue;
            }
            for (_, held, plan) in &of_group {
                let size = plan.selectable.shape(held.by_columns).nbytes();
                // SAFETY: the staging is this engine's, and a group's segments have disjoint
                // places in it; the lane comes after the step of the channels.
                unsafe { self.copy(moving.device, Lane::Download, plan, size)? };
                nbytes += size as u64;
            }
            moving.device.record(Lane::Download, self.events[0])?;
            moving.device.wait(self.events[0])?;
            // An upload of a segment's own weight may still read it.
            of_group.iter().try_for_each(|(one, ..)| (moving.wait_for_landing)(one.segment))?;
            moving.for_each(of_group.len(), |number| {
                let (one, held, plan) = &of_group[number];
                // SAFETY: the staged state has come; the rest is passed on from the caller.
                unsafe { self.write_one(moving, one, held, plan) }
            })?;
        }
        Ok(nbytes)
    }

    /// # Safety
    /// As [`Self::write_back`].
    unsafe fn write_one(
        &self,
        moving: &Moving<'_>,
        one: &Returning,
        held: &Held,
        plan: &Plan,
    ) -> Result<()> {
        let tensor = (moving.tensor_of)(one.tensor, one.segment)?;
        let shape = plan.selectable.shape(held.by_columns);
        let (state, _) = ChannelState::within(self.staged(plan, &shape), &shape);
        let block = block_of(&tensor, &plan.selectable);
        let channels = (&shape, held.indices.as_slice());
        // SAFETY: passed on from the caller.
        unsafe {
            write(moving.isa, &block, channels, &state);
            // The pass has taken them of what is dead.
            for chunk in moving.segments.chunks(one.tensor, one.segment) {
                take_fingerprint(moving.isa, &tensor, chunk);
            }
        }
        if let Some(predicted) = one.predicted {
            // The pass has written what is dead.
            let first =
                plan.selectable.first - moving.segments.elements(one.tensor, one.segment).start;
            let weight = predicted.part(first..first + shape.block_len());
            let kind = WeightKind::of(&tensor)?;
            // SAFETY: as above.
            unsafe { write_weights(moving.isa, channels, kind, state.master, weight) };
        }
        Ok(())
    }

    /// Picks up the state of new selections, group by group, and sends it to the device. Returns
    /// how many bytes.
    ///
    /// # Safety
    /// As [`Self::write_back`].
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed.
    pub(super) unsafe fn pick_up(&self, moving: &Moving<'_>, changes: Vec<Change>) -> Result<u64> {
        let mut nbytes = 0;
        let mut by_group: Vec<Vec<(Change, Plan)>> =
            (0..moving.groups.count()).map(|_| Vec::new()).collect();
        for change in changes {
            if let Some(plan) = self.plans.of_segments[change.segment] {
                by_group[plan.selectable.group].push((change, plan));
            }
        }
        let mut is_staging_used = false;
        for of_group in by_group.into_iter().filter(|of_group| !of_group.is_empty()) {
            if is_staging_used {
                moving.device.wait(self.events[1])?;
            }
            moving.for_each(of_group.len(), |number| {
                let (change, plan) = &of_group[number];
                let tensor = (moving.tensor_of)(plan.selectable.tensor, change.segment)?;
                let shape = plan.selectable.shape(change.by_columns);
                let (state, indices) = ChannelState::within(self.staged(plan, &shape), &shape);
                let block = block_of(&tensor, &plan.selectable);
                // SAFETY: passed on from the caller; the staging is this engine's, no copy from or
                // to it is under way, and a group's segments have disjoint places in it.
                unsafe {
                    read(moving.isa, &block, (&shape, &change.indices), &state);
                    indices.slice_mut::<u32>(0..shape.count).copy_from_slice(&change.indices);
                }
                Ok(())
            })?;
            for (change, plan) in &of_group {
                let size = plan.selectable.shape(change.by_columns).nbytes();
                // SAFETY: as in `write_back`; the device's state of the segment is not used: what
                // it had selected is written back.
                unsafe { self.copy(moving.device, Lane::Upload, plan, size)? };
                nbytes += size as u64;
            }
            moving.device.record(Lane::Upload, self.events[1])?;
            is_staging_used = true;
            let held = &mut self.state().held;
            for (Change { segment, by_columns, indices }, _) in of_group {
                held[segment] = Some(Held { by_columns, indices, is_dirty: false });
            }
        }
        Ok(nbytes)
    }

    /// # Safety
    /// As [`Device::copy`].
    unsafe fn copy(&self, device: &dyn Device, lane: Lane, plan: &Plan, size: usize) -> Result<()> {
        let host = self.staging.address() + plan.staging_offset;
        let host = std::ptr::with_exposed_provenance_mut(host);
        // SAFETY: passed on from the caller; both sides hold what a segment takes at most.
        unsafe { device.copy(lane, self.device + plan.offset as u64, host, size) }
    }

    fn staged(&self, plan: &Plan, shape: &Shape) -> View {
        self.staging.part(plan.staging_offset..plan.staging_offset + shape.nbytes())
    }
}

/// The block of a segment.
fn block_of(tensor: &AdamTensor, selectable: &Selectable) -> AdamTensor {
    let len = selectable.rows * selectable.row_len;
    tensor.without_fingerprints().elements(selectable.first..selectable.first + len)
}

/// What it takes to move state.
pub(super) struct Moving<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) segments: &'a Segments,
    pub(super) groups: &'a Groups,
    pub(super) isa: Isa,
    /// A tensor as a segment of it was stepped, in its home.
    pub(super) tensor_of: &'a (dyn Fn(usize, usize) -> Result<AdamTensor> + Sync),
    pub(super) pool: &'a Pool,
    /// Waits for the last upload of a segment.
    pub(super) wait_for_landing: &'a (dyn Fn(usize) -> Result<()> + Sync),
}

impl Moving<'_> {
    fn for_each(&self, count: usize, each: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
        let failure = Mutex::new(None);
        self.pool.run(count, &|number| {
            if let Err(error) = each(number) {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}
