//! What is to be done: gradients that no step has applied yet, and weights that the device lacks.
//!
//! Of an exact step it is filled and emptied within one job. Deferred steps leave some of it for
//! the turns and jobs to come.
//!
//! - PEND-1 A gradient is added once, with the coefficients of its own step, and taken off by the
//!   turn that applies it. A segment's gradients are applied in the order of their steps.
//! - PEND-2 A segment has at most as many gradients as there are steps between its turns; more are
//!   an error, not a later turn.
//! - PEND-3 Whatever is pending of a tensor is stepped with the state that its last update named.
//!   An update that names another state while gradients are pending is refused.
//!
//! Memory: per segment 96 B for each step between its turns, per tensor two updates.

use super::{
    job::{Job, Kind, Update},
    ring::Ring,
    segment::Segments,
};
use crate::{
    adam::Step,
    error::{Error, Result},
    stream::view::View,
};

/// A gradient that waits for its turn.
pub(super) struct Entry {
    /// As a view of the whole tensor's, of which only the segment's elements are there.
    pub(super) grad: View,
    /// The coefficients of its step.
    pub(super) step: Step,
    /// The number of its job.
    job: u64,
    /// Whether its turn has to look at fingerprints: the program may have written the weight before
    /// the job.
    verifies: bool,
}

/// What the device lacks of a segment's weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    /// Nothing.
    Landed,
    /// It has another: a predicted one, or channels of it from a copy that has parted from the host
    /// ([`super::selected`]).
    Ahead,
    /// All: its turn is over, and the new one has not been uploaded.
    Stepped,
}

/// A weight that lands with the next job.
#[derive(Clone, Copy)]
pub(super) struct Landing {
    pub(super) tensor: usize,
    pub(super) segment: usize,
    /// The predicted weight; None: the host's own.
    pub(super) predicted: Option<View>,
}

/// See the [module](self).
pub(super) struct Pending {
    /// How many gradients a segment may have.
    interval: usize,
    /// For each segment, with room for as many.
    entries: Box<[Vec<Entry>]>,
    weights: Box<[Weight]>,
    /// For each tensor its last update, and the number of the job that it came with.
    updates: Box<[Option<(u64, Update)>]>,
    /// For each tensor its last update that came with fingerprints.
    verifying: Box<[Option<Update>]>,
    /// What lands with the next job, in the order of the turns.
    landings: Vec<Landing>,
    /// How many jobs have been added.
    job: u64,
    /// How many deferred ones since all was stepped.
    turn: usize,
}

impl Pending {
    /// Nothing, of segments with so many gradients at most.
    pub(super) fn new(segments: &Segments, ring: Option<&Ring>) -> Self {
        let count = segments.count();
        let interval = ring.map_or(1, |ring| ring.groups.count());
        Self {
            interval,
            entries: (0..count).map(|_| Vec::with_capacity(interval)).collect(),
            weights: vec![Weight::Landed; count].into(),
            updates: vec![None; segments.tensors()].into(),
            verifying: vec![None; segments.tensors()].into(),
            landings: Vec::with_capacity(if ring.is_some() { count } else { 0 }),
            job: 0,
            turn: 0,
        }
    }

    /// Checks that what is pending can be stepped with the states that these updates name.
    ///
    /// # Errors
    /// [`Error::Value`] where it cannot.
    pub(super) fn check(&self, segments: &Segments, updates: &[Update]) -> Result<()> {
        for update in updates {
            let Some((_, last)) = &self.updates[update.index] else { continue };
            let is_pending = segments
                .of(update.index)
                .any(|segment| self.is_pending(segment) || self.is_behind(segment));
            // Not every step has to look at them.
            let [now, before] = [update, last].map(|one| one.tensor.without_fingerprints());
            let is_same = now.written().eq(before.written());
            if is_pending && !is_same {
                return Err(Error::value(format!(
                    "tensor `{}` has another state than its deferred updates are for, expected \
                     the same memory\nhint: settle what is deferred first",
                    update.index
                )));
            }
        }
        Ok(())
    }

    /// Adds the gradients of a job.
    ///
    /// # Errors
    /// [`Error::Value`] for a segment that has had no turn for too long.
    pub(super) fn add(
        &mut self,
        segments: &Segments,
        job: &Job,
        ring: Option<&Ring>,
    ) -> Result<()> {
        self.job += 1;
        for update in &job.updates {
            let step = Step::new(&update.hyper, update.count);
            let verifies = update.tensor.fingerprints().is_some();
            if verifies {
                self.verifying[update.index] = Some(*update);
            }
            self.updates[update.index] = Some((self.job, *update));
            for segment in segments.of(update.index) {
                let grad = match (ring, job.generation) {
                    (Some(ring), Some(number)) => {
                        ring.whole_gradient(number, segments, update.index, segment)
                    }
                    _ => update.tensor.grad,
                };
                let grad = grad.ok_or_else(|| {
                    Error::value(format!("tensor `{}` has no grad", update.index))
                })?;
                let entries = &mut self.entries[segment];
                if entries.len() == self.interval {
                    return Err(Error::value(format!(
                        "segment `{segment}` of tensor `{}` has had no turn for too many steps",
                        update.index
                    )));
                }
                entries.push(Entry { grad, step, job: self.job, verifies });
            }
        }
        Ok(())
    }

    /// The gradients of a segment, the oldest first.
    pub(super) fn entries(&self, segment: usize) -> &[Entry] {
        &self.entries[segment]
    }

    /// Whether a segment has a gradient.
    pub(super) fn is_pending(&self, segment: usize) -> bool {
        !self.entries[segment].is_empty()
    }

    /// Whether a segment has a gradient of the job that was added last, which may be on its way.
    pub(super) fn is_arriving(&self, segment: usize) -> bool {
        self.entries[segment].last().is_some_and(|entry| entry.job == self.job)
    }

    /// The update that has the state for the turn of a segment of `tensor`: with fingerprints where
    /// one of its gradients came with them.
    pub(super) fn stepped_as(&self, tensor: usize, segment: usize) -> Option<&Update> {
        if self.entries[segment].iter().any(|entry| entry.verifies) {
            self.verifying[tensor].as_ref()
        } else {
            self.update(tensor)
        }
    }

    /// The last update of a tensor.
    pub(super) fn update(&self, tensor: usize) -> Option<&Update> {
        self.updates[tensor].as_ref().map(|(_, update)| update)
    }

    /// Whether the job that was added last has an update of this tensor.
    pub(super) fn is_in_job(&self, tensor: usize) -> bool {
        self.updates[tensor].as_ref().is_some_and(|(job, _)| *job == self.job)
    }

    /// How many deferred jobs there were since all was stepped.
    pub(super) fn turn(&self) -> usize {
        self.turn
    }

    /// How many steps ago the oldest gradient came that no turn has applied; 0: there is none, or
    /// it came with the last step.
    pub(super) fn oldest_age(&self) -> u64 {
        let oldest = self.entries.iter().flatten().map(|entry| entry.job).min();
        oldest.map_or(0, |oldest| self.job - oldest)
    }

    /// Whether any gradient is pending, or the device lacks any weight.
    pub(super) fn is_any(&self) -> bool {
        self.weights.iter().any(|weight| *weight != Weight::Landed)
            || self.entries.iter().any(|entries| !entries.is_empty())
    }

    /// Whether the device lacks the weight of a segment.
    pub(super) fn is_behind(&self, segment: usize) -> bool {
        self.weights[segment] != Weight::Landed
    }

    /// Whether the device has another weight of a segment that has no gradient.
    pub(super) fn is_left_ahead(&self, segment: usize) -> bool {
        self.weights[segment] == Weight::Ahead && !self.is_pending(segment)
    }

    /// What lands with the next job.
    pub(super) fn landings(&self) -> &[Landing] {
        &self.landings
    }

    /// The landings are enqueued. Of some segments the device has a copy that `has_parted` from the
    /// host.
    pub(super) fn landed(&mut self, has_parted: impl Fn(usize) -> bool) {
        for landing in self.landings.drain(..) {
            let is_ahead = landing.predicted.is_some() || has_parted(landing.segment);
            self.weights[landing.segment] = if is_ahead { Weight::Ahead } else { Weight::Landed };
        }
    }

    /// The device gets the host's own weight of a segment, with this job.
    pub(super) fn is_landing_now(&mut self, segment: usize) {
        self.weights[segment] = Weight::Landed;
    }

    /// The turn of a segment is over. Its weight lands with the next job, or with this one: None.
    pub(super) fn turned(&mut self, segment: usize, landing: Option<Landing>) {
        self.entries[segment].clear();
        self.weights[segment] = match landing {
            Some(_) => Weight::Stepped,
            None => Weight::Landed,
        };
        self.landings.extend(landing);
    }

    /// A job has ended.
    pub(super) fn end(&mut self, kind: Kind) {
        self.turn = match kind {
            Kind::Whole => 0,
            Kind::Deferred { .. } => self.turn + 1,
        };
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::{
        adam::{Hyper, tensor::AdamTensor},
        host::executor::{Executor, Role},
        offload::{
            job::{Jobs, Timing, Work},
            ring::{Deferral, deferral_nbytes},
            segment::SEGMENT_LEN,
        },
        stream::element::Dtype,
    };

    /// Two segments, and one.
    const NUMELS: [usize; 2] = [SEGMENT_LEN + 1, 10];

    /// Elements that nothing reads.
    fn view(dtype: Dtype, numel: usize) -> View {
        View::new(64, dtype, numel).expect("a view")
    }

    /// An update of every tensor.
    fn updates() -> Vec<Update> {
        let update = |(index, numel): (usize, usize)| {
            let of = view(Dtype::Float32, numel);
            let moments = [("exp_avg", of), ("exp_avg_sq", of)];
            let tensor = AdamTensor::new(of, &moments, Some(of), None, 0).expect("a tensor");
            let hyper = Hyper::default();
            Update { index, tensor, weight: None, is_at_once: false, count: 1, hyper }
        };
        NUMELS.into_iter().enumerate().map(update).collect()
    }

    /// Adds the gradients of jobs. In each one group has its turn, but for the segment that is left
    /// out.
    struct Adding {
        segments: Segments,
        ring: Ring,
        pending: Pending,
        left_out: Option<usize>,
    }

    impl Adding {
        fn new(interval: usize, left_out: Option<usize>) -> Self {
            let segments = Segments::new(&NUMELS);
            let dtypes = [Dtype::Float32; 2];
            let (nbytes, _) = deferral_nbytes(&NUMELS, &dtypes, interval).expect("an interval");
            let gradients = view(Dtype::Uint8, nbytes);
            let deferral =
                Deferral { interval, dtypes: &dtypes, gradients, predicted: None, selection: None };
            let ring = Ring::new(&segments, &deferral).expect("a ring");
            let pending = Pending::new(&segments, Some(&ring));
            Self { segments, ring, pending, left_out }
        }

        fn most(&self) -> usize {
            let of = |segment| self.pending.entries(segment).len();
            (0..self.segments.count()).map(of).max().unwrap_or(0)
        }
    }

    impl Work for Adding {
        fn step(&mut self, job: &Job) -> Result<Timing> {
            let Self { segments, ring, pending, left_out } = self;
            pending.add(segments, job, Some(ring))?;
            let group = pending.turn() % ring.groups.count();
            (0..segments.count())
                .filter(|&segment| ring.groups.of(segment) == group)
                .filter(|&segment| Some(segment) != *left_out)
                .for_each(|segment| pending.turned(segment, None));
            pending.end(job.kind);
            Ok(Timing::default())
        }

        fn commit(&mut self, _: &Job) -> Result<()> {
            Ok(())
        }

        fn upload(&mut self) -> Result<()> {
            Ok(())
        }
    }

    fn jobs() -> Jobs {
        Jobs::new(2, Executor::of_process(Role::Jobs).expect("a thread"))
    }

    /// Moves a deferred job of all tensors on. What the engine's next call is told.
    fn next_job(jobs: &Jobs, adding: &mut Adding) -> Result<()> {
        jobs.submit(None, Kind::Deferred { predicted_updates: 0.0 }, &updates(), None, 0);
        jobs.advance(adding);
        jobs.check_idle()
    }

    #[test]
    fn a_segment_without_a_turn_for_too_many_steps_fails_the_job() {
        for (left_out, tensor) in [(0, 0), (1, 0), (2, 1)] {
            for interval in [1, 2, 3] {
                let (jobs, mut adding) = (jobs(), Adding::new(interval, Some(left_out)));
                for _ in 0..interval {
                    next_job(&jobs, &mut adding).expect("as many gradients as it may have");
                }
                let error = next_job(&jobs, &mut adding).expect_err("one more");
                let said = error.to_string();
                let expected = format!(
                    "segment `{left_out}` of tensor `{tensor}` has had no turn for too many steps"
                );
                assert!(matches!(error, Error::Os { .. }) && said.ends_with(&expected), "{said}");
                // It is no later turn.
                assert_eq!(adding.pending.entries(left_out).len(), interval);
                let again = jobs.check_idle().expect_err("it has failed").to_string();
                assert_eq!(again, said);
            }
        }
    }

    #[test]
    fn a_segment_has_as_many_gradients_as_steps_between_its_turns() {
        for interval in [1, 2, 3] {
            let (jobs, mut adding) = (jobs(), Adding::new(interval, None));
            let mut most = 0;
            for _ in 0..4 * interval {
                next_job(&jobs, &mut adding).expect("a job that works");
                most = most.max(adding.most());
                assert!(adding.pending.oldest_age() < interval as u64);
            }
            // And the one that its turn has come with.
            assert_eq!(most + 1, interval);
        }
    }
}
