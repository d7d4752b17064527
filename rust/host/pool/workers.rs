//! The workers that parts of a pool share: one crew, and more where jobs have waited for those that
//! block.

use std::io;
use std::time::Duration;

use super::crew::{Balance, Crew, Payload, run_inline};
use crate::Result;
use crate::host::fork;
use crate::sync::atomic::{AtomicBool, AtomicUsize};
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How long a job waits for workers that a job which may block has, before it gets others.
pub const PATIENCE: Duration = Duration::from_millis(50);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Workers {
    pub(super) cpus: Vec<usize>,
    nice: i32,
    crews: Mutex<Crews>,
    /// A crew has become idle.
    returned: Condvar,
    pub(super) has_warned: AtomicBool,
    /// How many of the CPUs, the first ones, other processes know of.
    pub(super) num_claimed: AtomicUsize,
    /// The ranks of this host, as the launcher has it.
    pub(super) num_ranks: usize,
    /// Whether the launcher knows of more ranks than cores: then some share one.
    pub(super) has_more_ranks_than_cores: bool,
}

/// One crew, and more where jobs have waited for those that block.
#[derive(Debug, Default)]
struct Crews {
    /// Of the process that they exist in.
    generation: u32,
    idle: Vec<Crew>,
    /// How many run jobs whose tasks may block.
    num_blocking: usize,
    /// How many run other jobs.
    num_others: usize,
}

impl Crews {
    fn num_busy(&mut self, may_block: bool) -> &mut usize {
        if may_block { &mut self.num_blocking } else { &mut self.num_others }
    }
}

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crew").field("generation", &self.generation()).finish_non_exhaustive()
    }
}

impl Drop for Workers {
    /// Joins the workers inside the gate: a thread that ends may hold a lock of Rust's runtime, and
    /// a child that is forked meanwhile would start no thread any more.
    fn drop(&mut self) {
        let _entered = fork::enter();
        self.crews.get_mut().unwrap_or_else(PoisonError::into_inner).idle.clear();
    }
}

impl Workers {
    /// Workers on these CPUs, and the first failure to pin one.
    pub(super) fn start(cpus: Vec<usize>, nice: i32) -> Result<(Self, Option<(usize, io::Error)>)> {
        let (crew, unpinned) = Crew::start(&cpus, nice)?;
        let crews = Crews { generation: crew.generation(), idle: vec![crew], ..Crews::default() };
        let workers = Self {
            cpus,
            nice,
            crews: Mutex::new(crews),
            returned: Condvar::new(),
            has_warned: AtomicBool::new(false),
            num_claimed: AtomicUsize::new(0),
            num_ranks: 1,
            has_more_ranks_than_cores: false,
        };
        Ok((workers, unpinned))
    }

    /// Runs a job on `threads` workers, or on this thread where none can be started; what its first
    /// panic left, and a warning. Called inside the gate.
    pub(super) fn run(
        &self,
        threads: usize,
        tasks: usize,
        (balance, may_block): (Balance, bool),
        task: &(dyn Fn(usize) + Sync),
    ) -> (Option<Payload>, Option<String>) {
        let (mut crew, unpinned) = match self.take_crew(may_block) {
            Ok(taken) => taken,
            Err(error) => {
                let warning = format!("work runs on the calling thread alone: {error}");
                return (run_inline(tasks, task), Some(warning));
            }
        };
        let payload = crew.run(threads, tasks, balance, task);
        let mut crews = self.lock();
        if crews.generation == crew.generation() {
            *crews.num_busy(may_block) -= 1;
            crews.idle.push(crew);
            drop(crews);
            self.returned.notify_one();
        }
        (payload, unpinned.map(|(cpu, error)| unpinned_warning(cpu, &error)))
    }

    /// A crew for a job: one that is idle, or another.
    fn take_crew(&self, may_block: bool) -> Result<(Crew, Option<(usize, io::Error)>)> {
        let mut crews = self.lock();
        if crews.generation != fork::generation() {
            // A forked child: the threads are not here.
            *crews = Crews { generation: fork::generation(), ..Crews::default() };
        }
        while crews.idle.is_empty() && crews.num_blocking + crews.num_others > 0 {
            let waited = self
                .returned
                .wait_timeout_while(crews, PATIENCE, |crews| crews.idle.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            crews = waited.0;
            if waited.1.timed_out() && crews.num_others == 0 {
                break;
            }
        }
        let taken = match crews.idle.pop() {
            Some(crew) => (crew, None),
            None => Crew::start(&self.cpus, self.nice)?,
        };
        *crews.num_busy(may_block) += 1;
        Ok(taken)
    }

    fn lock(&self) -> MutexGuard<'_, Crews> {
        self.crews.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn unpinned_warning(cpu: usize, error: &io::Error) -> String {
    format!(
        "workers are not pinned: the system refused CPU `{cpu}`: {error}; hint: allow \
         `sched_setaffinity` in the sandbox"
    )
}
