//! What the workers do with the chunks of a job.

use std::time::{Duration, Instant};

use super::{
    engine::Shared,
    job::{Job, Timing, Update, Work},
    schedule::{Schedule, Turn},
};
use crate::{
    adam::batch,
    device::Attached,
    error::{Error, Result},
    state::chunk::Chunk,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    tier::{Run, Stored},
};

/// Steps jobs. The turns of one are listed in memory that all have used.
pub(super) struct Stepper {
    shared: Arc<Shared>,
    schedule: Box<dyn Schedule>,
    turns: Vec<Turn>,
}

impl Stepper {
    pub(super) fn new(shared: Arc<Shared>, schedule: Box<dyn Schedule>) -> Self {
        let turns = Vec::with_capacity(shared.segments.count());
        Self { shared, schedule, turns }
    }
}

impl Work for Stepper {
    fn step(&mut self, job: &Job) -> Result<Timing> {
        let begin = Instant::now();
        self.turns.clear();
        self.schedule.list(&self.shared.segments, job, &mut self.turns);
        let gradients = self.shared.step(&job.updates, &self.turns)?;
        let uploaded = job.updates.iter().filter(|update| update.weight.is_some());
        let nbytes = uploaded.map(|update| update.tensor.weight().nbytes() as u64);
        Ok(Timing {
            step: begin.elapsed(),
            gradients,
            bytes_downloaded: self.shared.generations[job.generation].nbytes(),
            bytes_uploaded: nbytes.sum(),
        })
    }

    fn commit(&mut self, job: &Job) -> Result<()> {
        let Shared { device, downloads, landing, tier, generations, jobs, .. } = &*self.shared;
        let _attached = Attached::to(&**device)?;
        tier.commit()?;
        for turn in &self.turns {
            if !landing.are_enqueued(turn.segment..turn.segment + 1) {
                self.shared.upload(&job.updates[turn.update], turn)?;
            }
        }
        landing.close()?;
        // What was taken and not stepped arrives as well.
        let generation = &generations[job.generation];
        generation.wait_for_all(downloads, &**device)?;
        generation.clear();
        jobs.give_back(|returned| generation.let_go(returned));
        Ok(())
    }

    fn upload(&mut self) -> Result<()> {
        let Shared { device, landing, .. } = &*self.shared;
        let _attached = Attached::to(&**device)?;
        landing.wait()
    }
}

impl Shared {
    /// Steps all chunks of these updates, in the order of the turns. Returns how long the worker
    /// that waited longest has waited for gradients.
    fn step(&self, updates: &[Update], turns: &[Turn]) -> Result<Duration> {
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let failure = Mutex::new(None);
        let longest_wait_ns = AtomicU64::new(0);
        let work = || -> Result<()> {
            let _attached = Attached::to(&*self.device)?;
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
                self.step_chunk(
                    &updates[turn.update],
                    turn,
                    turn.first_chunk + number - turn.begin,
                    &mut waited,
                )?;
            }
            longest_wait_ns.fetch_max(waited.as_nanos() as u64, Ordering::Relaxed);
            Ok(())
        };
        self.pool.run_on_each_worker(&|_| {
            if let Err(error) = work() {
                failed.store(true, Ordering::Relaxed);
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
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
        update: &Update,
        turn: &Turn,
        index: usize,
        waited: &mut Duration,
    ) -> Result<()> {
        let chunk = Chunk { tensor: update.index, index };
        if !turn.is_ready.load(Ordering::Acquire) {
            self.tier.fetch(&self.run_of(update, turn))?;
            let begin = Instant::now();
            self.generations[turn.generation].wait(turn.segment, &self.downloads, &*self.device)?;
            turn.is_ready.store(true, Ordering::Release);
            *waited += begin.elapsed();
        }
        let grad = update
            .tensor
            .grad
            .ok_or_else(|| Error::value(format!("tensor `{}` has no grad", update.index)))?;
        let state = self.tier.route(&update.tensor, chunk);
        // SAFETY: submit's caller vouches for the memory, and the job holds what was lent for it;
        // no other worker has this chunk, its gradient has arrived and, as the job before is
        // uploaded, nothing reads its last weight any more.
        unsafe { batch::step_chunk(self.isa, &state, grad, &turn.step, chunk) };
        // Release hands this chunk's writes to the worker of the last one, which acquires all of
        // them.
        if turn.chunks_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            match self.tier.store(&self.run_of(update, turn))? {
                Stored::Final => self.upload(update, turn)?,
                Stored::WithCommit => {}
            }
        }
        Ok(())
    }

    fn run_of(&self, update: &Update, turn: &Turn) -> Run {
        let tensor = update.index;
        Run { tensor, chunks: self.segments.chunks(tensor, turn.segment) }
    }

    fn upload(&self, update: &Update, turn: &Turn) -> Result<()> {
        // SAFETY: submit's caller vouches for both sides, and the job holds what was lent for them;
        // all chunks of the segment are stepped, and the next job begins when this is uploaded.
        unsafe { self.landing.enqueue(&self.segments, update, turn.segment)? };
        self.jobs.notify();
        Ok(())
    }
}
