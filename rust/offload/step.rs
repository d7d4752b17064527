//! What the workers do with the chunks of a job.

use std::time::{Duration, Instant};

use super::{
    groups::INTERVAL_MAX,
    handover::Handover,
    job::{Job, Kind, Timing, Update, Work},
    pending::{Entry, Landing, Pending},
    schedule::{Turn, list_all, list_group},
    selected::{Picking, Selected},
    shared::Shared,
};
use crate::{
    adam::{
        batch,
        tensor::AdamTensor,
        through::{Predicted, step_chunk_through},
    },
    device::Attached,
    error::{Error, Result},
    host::executor::Task,
    state::chunk::Chunk,
    stream::view::View,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    tier::{Planned, Stored},
};

/// Steps jobs. The turns of one are listed in memory that all have used.
pub(super) struct Stepper {
    shared: Arc<Shared>,
    turns: Vec<Turn>,
    /// What has landed with the job.
    landed: Vec<Landing>,
}

impl Stepper {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let count = shared.segments.count();
        let landings = if shared.ring.is_some() { count } else { 0 };
        Self { shared, turns: Vec::with_capacity(count), landed: Vec::with_capacity(landings) }
    }

    fn list(&mut self, job: &Job, pending: &Pending) {
        let Shared { segments, ring, .. } = &*self.shared;
        self.turns.clear();
        match (job.kind, ring) {
            (Kind::Deferred { .. }, Some(ring)) => {
                list_group(segments, &ring.groups, job, pending, &mut self.turns);
            }
            _ => list_all(segments, job, pending, &mut self.turns),
        }
    }

    /// Lists what lands with this job.
    fn land(&mut self, job: &Job, pending: &mut Pending) {
        let Shared { segments, selected, .. } = &*self.shared;
        let selected = selected.as_ref();
        self.landed.clear();
        match job.kind {
            Kind::Deferred { .. } => {
                let is_at_once = |tensor| {
                    pending.is_in_job(tensor)
                        && pending.update(tensor).is_some_and(|update| update.is_at_once)
                };
                // Those are stepped, and land when they are.
                let landings = pending.landings().iter();
                self.landed.extend(landings.filter(|one| !is_at_once(one.tensor)));
                let num_due = self.landed.len();
                for tensor in 0..segments.tensors() {
                    let own = |segment| Landing { tensor, segment, predicted: None };
                    let ahead = segments.of(tensor).filter(|&segment| {
                        !pending.is_in_job(tensor) && self.shared.is_left_ahead(pending, segment)
                    });
                    self.landed.extend(ahead.map(own));
                }
                pending.landed(|segment| selected.is_some_and(|all| all.has_parted(segment)));
                for landing in &self.landed[num_due..] {
                    pending.is_landing_now(landing.segment);
                    if let Some(selected) = selected {
                        selected.renew(landing.segment);
                    }
                }
            }
            // Those that are stepped land when they are.
            Kind::Whole => {
                for tensor in 0..segments.tensors() {
                    let own = |segment| Landing { tensor, segment, predicted: None };
                    let behind = segments.of(tensor).filter(|&segment| {
                        pending.is_behind(segment) && !pending.is_pending(segment)
                    });
                    self.landed.extend(behind.map(own));
                }
                // Nothing is selected any more.
                pending.landed(|_| false);
                for landing in &self.landed {
                    pending.is_landing_now(landing.segment);
                }
            }
        }
        self.landed.retain(|landing| pending.update(landing.tensor).is_some());
    }
}

impl Task for Mutex<Stepper> {
    fn run(&self) {
        let mut stepper = self.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = Arc::clone(&stepper.shared);
        shared.jobs.advance(&mut *stepper);
    }
}

impl Work for Stepper {
    fn step(&mut self, job: &Job) -> Result<Timing> {
        let shared = Arc::clone(&self.shared);
        let begin = Instant::now();
        let mut pending = shared.pending();
        pending.add(&shared.segments, job, shared.ring.as_ref())?;
        if let (Some(ring), Some(number)) = (&shared.ring, job.generation) {
            ring.keep(number);
        }
        self.land(job, &mut pending);
        self.list(job, &pending);
        shared.announce(&pending, &self.turns)?;
        let pass = Pass {
            kind: job.kind,
            generation: job.generation,
            pending: &pending,
            landings: Handover::new(&self.landed),
        };
        // Workers hand over what lands, at once.
        let first = self.turns.first().filter(|_| self.landed.is_empty());
        let waited = shared.wait_for_first(&pass, first)?;
        let gradients = waited + shared.step(&pass, &self.turns)?;
        let landed: u64 = self.landed.iter().map(|one| shared.landing_nbytes(&pending, one)).sum();
        let picked_up = shared.pick_up(&pending)?;
        let is_uploaded = |tensor| pending.update(tensor).is_some_and(|one| one.weight.is_some());
        let now = self.turns.iter().filter(|turn| turn.lands_now && is_uploaded(turn.tensor));
        let nbytes: usize = now.map(|turn| shared.weight_nbytes(&pending, turn)).sum();
        for turn in &self.turns {
            let landing = (!turn.lands_now).then(|| Landing {
                tensor: turn.tensor,
                segment: turn.segment,
                predicted: shared.predicted(job.kind, turn).map(|(view, _)| view),
            });
            pending.turned(turn.segment, landing);
        }
        if let Some(ring) = &shared.ring {
            let group = pending.turn() % ring.groups.count();
            ring.free(match job.kind {
                Kind::Whole => 0..ring.groups.count(),
                Kind::Deferred { .. } => group..group + 1,
            });
        }
        let oldest_age = pending.oldest_age();
        pending.end(job.kind);
        let downloaded = job.generation.map_or(0, |number| shared.generations[number].nbytes());
        Ok(Timing {
            step: begin.elapsed(),
            gradients,
            oldest_age,
            bytes_downloaded: downloaded,
            bytes_uploaded: landed + nbytes as u64 + picked_up,
        })
    }

    fn commit(&mut self, job: &Job) -> Result<()> {
        let Shared { device, downloads, uploads, tier, generations, jobs, .. } = &*self.shared;
        let _attached = Attached::to(&**device)?;
        tier.commit()?;
        let pending = self.shared.pending();
        for turn in self.turns.iter().filter(|turn| turn.lands_now) {
            if !uploads.are_enqueued(turn.segment..turn.segment + 1)
                && let Some(update) = pending.update(turn.tensor)
            {
                self.shared.upload(update, turn.segment, None)?;
                jobs.notify();
            }
        }
        drop(pending);
        uploads.close()?;
        // What was taken and not stepped arrives as well.
        if let Some(number) = job.generation {
            let generation = &generations[number];
            generation.wait_for_all(downloads, &**device)?;
            generation.clear();
            jobs.give_back(|returned| generation.let_go(returned));
        }
        Ok(())
    }

    fn upload(&mut self) -> Result<()> {
        let Shared { device, uploads, .. } = &*self.shared;
        let _attached = Attached::to(&**device)?;
        uploads.wait()
    }
}

/// What the workers read while they step a job.
struct Pass<'a> {
    kind: Kind,
    generation: Option<usize>,
    pending: &'a Pending,
    /// What lands with the job, whose memory the turns write again.
    landings: Handover<'a>,
}

impl Shared {
    /// Waits until the first turn has its gradient, which is mostly the last to come: until then no
    /// worker is kept from other engines. Returns how long.
    fn wait_for_first(&self, pass: &Pass<'_>, turn: Option<&Turn>) -> Result<Duration> {
        let begin = Instant::now();
        if let (Some(number), Some(turn)) = (pass.generation, turn)
            && pass.pending.is_arriving(turn.segment)
        {
            let _attached = Attached::to(&*self.device)?;
            self.generations[number].wait(turn.segment, &self.downloads, &*self.device)?;
        }
        Ok(begin.elapsed())
    }

    /// Steps all chunks of these turns, in their order. Returns how long the worker that waited
    /// longest has waited for gradients.
    fn step(&self, pass: &Pass<'_>, turns: &[Turn]) -> Result<Duration> {
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let failure = Mutex::new(None);
        let longest_wait_ns = AtomicU64::new(0);
        let hand_over = || {
            pass.landings.hand_over(&self.uploads, |&Landing { tensor, segment, predicted }| {
                if let Some(update) = pass.pending.update(tensor) {
                    self.upload(update, segment, predicted)?;
                    self.jobs.notify();
                }
                Ok(())
            })
        };
        let work = || -> Result<()> {
            let mut waited = Duration::ZERO;
            let mut left = turns;
            while !failed.load(Ordering::Relaxed) {
                // The next chunk, whichever worker comes. Numbers only grow, so turns behind this
                // worker's last chunk are not looked at again.
                let number = next.fetch_add(1, Ordering::Relaxed);
                while left.first().is_some_and(|turn| turn.end <= number) {
                    left = &left[1..];
                }
                let Some(turn) = left.first() else { break };
                self.step_chunk(pass, turn, turn.first_chunk + number - turn.begin, &mut waited)?;
            }
            longest_wait_ns.fetch_max(waited.as_nanos() as u64, Ordering::Relaxed);
            Ok(())
        };
        let note = |result: Result<()>| {
            if let Err(error) = result {
                failed.store(true, Ordering::Relaxed);
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        };
        self.pool.run_blocking(&|worker| {
            let closing = (worker == 0).then(|| pass.landings.closing());
            match Attached::to(&*self.device) {
                Ok(_attached) => {
                    if closing.is_some() {
                        note(hand_over());
                    }
                    // What is wrong is noted before others hear of it.
                    drop(closing);
                    note(work());
                }
                Err(error) => note(Err(error)),
            }
        });
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(Duration::from_nanos(longest_wait_ns.into_inner())),
        }
    }

    /// Steps one chunk of a turn. After the last, hands over the segment.
    fn step_chunk(
        &self,
        pass: &Pass<'_>,
        turn: &Turn,
        index: usize,
        waited: &mut Duration,
    ) -> Result<()> {
        let (tensor, segment) = (turn.tensor, turn.segment);
        let update = pass
            .pending
            .stepped_as(tensor, segment)
            .ok_or_else(|| Error::value(format!("tensor `{tensor}` was never stepped")))?;
        let chunk = Chunk { tensor, index };
        if !turn.is_ready.load(Ordering::Acquire) {
            let begin = Instant::now();
            if let Some(number) = pass.generation.filter(|_| pass.pending.is_arriving(segment)) {
                self.generations[number].wait(segment, &self.downloads, &*self.device)?;
            }
            *waited += begin.elapsed();
            self.wait_for_landed(pass, turn)?;
            turn.is_ready.store(true, Ordering::Release);
        }
        let state = self.tier.fetch(&update.tensor, chunk)?;
        let elements = chunk.range(self.segments.numel(tensor));
        let predicted = self.predicted(pass.kind, turn).map(|(view, ahead)| {
            let begin = self.segments.elements(tensor, segment).start;
            Predicted { weight: view.part(elements.start - begin..elements.end - begin), ahead }
        });
        // SAFETY: submit's caller vouches for the memory, and what was lent for it is held; no
        // other worker has this chunk, its gradients have arrived, and nothing reads its last
        // weights any more: the job before is uploaded, and what landed before this job and is
        // written now has been waited for.
        unsafe {
            match (pass.pending.entries(segment), predicted) {
                ([entry], None) => {
                    batch::step_chunk(self.isa, &state, entry.grad, &entry.step, chunk);
                }
                (entries, predicted) => {
                    let of = |entry: &Entry| (entry.grad.part(elements.clone()), entry.step);
                    let mut updates = [of(&entries[0]); INTERVAL_MAX];
                    updates.iter_mut().zip(entries).for_each(|(one, entry)| *one = of(entry));
                    let updates = &updates[..entries.len()];
                    step_chunk_through(self.isa, &state, updates, predicted, chunk);
                }
            }
        }
        let stored = self.tier.store(&update.tensor, chunk)?;
        // Release hands this chunk's writes to the worker of the last one, which acquires all of
        // them. A run has one tier, so what holds for its last chunk holds for all.
        if turn.chunks_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            match stored {
                Stored::Final if turn.lands_now => {
                    self.upload(pass.pending.update(tensor).unwrap_or(update), segment, None)?;
                    self.jobs.notify();
                }
                Stored::Final | Stored::WithCommit => {}
            }
        }
        Ok(())
    }

    /// Waits until no upload reads the memory that the turn writes a weight to.
    fn wait_for_landed(&self, pass: &Pass<'_>, turn: &Turn) -> Result<()> {
        let written = self.predicted(pass.kind, turn).map(|(view, _)| view);
        pass.landings.wait_for_last(&self.uploads, |landing| match (landing.predicted, written) {
            (Some(read), Some(written)) => read.address() < written.address() + written.nbytes(),
            _ => landing.segment == turn.segment && landing.predicted.is_none(),
        })
    }

    /// Where the predicted weight of a turn goes, and how far it runs ahead; None: no weight is
    /// predicted.
    fn predicted(&self, kind: Kind, turn: &Turn) -> Option<(View, f32)> {
        match kind {
            Kind::Deferred { predicted_updates } if predicted_updates > 0.0 && !turn.lands_now => {
                let ring = self.ring.as_ref()?;
                let view = ring.predicted(&self.segments, turn.tensor, turn.segment)?;
                Some((view, predicted_updates))
            }
            _ => None,
        }
    }

    /// Sends the state of channels that are selected anew to the device; the pass is over. Returns
    /// how many bytes.
    fn pick_up(&self, pending: &Pending) -> Result<u64> {
        let Some(selected) = &self.selected else { return Ok(0) };
        let changes = selected.take_changes();
        if changes.is_empty() {
            return Ok(0);
        }
        let _attached = Attached::to(&*self.device)?;
        let tensor_of = |tensor| self.home_of(pending, tensor);
        let picking = Picking {
            device: &*self.device,
            pool: &self.pool,
            isa: self.isa,
            tensor_of: &tensor_of,
        };
        // SAFETY: the pass is over, and nothing writes the state of its segments until the next;
        // submit's caller vouches for the memory, and what was lent for it is held.
        unsafe { selected.pick_up(&picking, changes) }
    }

    /// A tensor, where the tier has its state in the tensor itself.
    fn home_of(&self, pending: &Pending, tensor: usize) -> Result<AdamTensor> {
        let update = pending
            .update(tensor)
            .ok_or_else(|| Error::value(format!("tensor `{tensor}` was never stepped")))?;
        if self.tier.is_at_home(tensor) {
            return Ok(update.tensor);
        }
        Err(Error::value(format!(
            "channels of tensor `{tensor}` are selected, expected a tier that keeps its state in \
             the tensor itself"
        )))
    }

    /// Whether the device has another weight of a segment whose turn it is, and that has no
    /// gradient: the host's lacks no update any more.
    pub(super) fn is_left_ahead(&self, pending: &Pending, segment: usize) -> bool {
        self.ring.as_ref().is_some_and(|ring| {
            let group = pending.turn() % ring.groups.count();
            ring.groups.of(segment) == group && pending.is_left_ahead(segment)
        })
    }

    /// Bytes of the weight that a turn steps.
    fn weight_nbytes(&self, pending: &Pending, turn: &Turn) -> usize {
        let size = pending.update(turn.tensor).map_or(0, |one| one.tensor.weight().dtype().size());
        self.segments.elements(turn.tensor, turn.segment).len() * size
    }

    /// Bytes of a landing that cross the bus.
    fn landing_nbytes(&self, pending: &Pending, landing: &Landing) -> u64 {
        pending.update(landing.tensor).filter(|update| update.weight.is_some()).map_or(
            0,
            |update| {
                let numel = self.segments.elements(landing.tensor, landing.segment).len();
                (numel * update.tensor.weight().dtype().size()) as u64
            },
        )
    }

    /// Tells the tier what is stepped.
    fn announce(&self, pending: &Pending, turns: &[Turn]) -> Result<()> {
        self.tier.begin(&mut turns.iter().filter_map(|turn| {
            let update = pending.stepped_as(turn.tensor, turn.segment)?;
            Some(Planned {
                tensor: turn.tensor,
                begin: turn.first_chunk,
                end: turn.first_chunk + (turn.end - turn.begin),
                state: &update.tensor,
                count: update.count,
            })
        }))
    }

    /// Enqueues the upload of a segment.
    fn upload(&self, update: &Update, segment: usize, predicted: Option<View>) -> Result<()> {
        // SAFETY: submit's caller vouches for both sides, and what was lent for them is held; all
        // chunks of the segment are stepped, and what writes its memory next waits for this.
        unsafe {
            let landing = |selected: &Selected| selected.landing(update, segment);
            let selected = self.selected.as_ref().map(landing).transpose()?.flatten();
            self.uploads.enqueue(&self.segments, update, segment, predicted, selected)
        }
    }
}
