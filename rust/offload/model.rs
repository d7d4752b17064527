//! The queue of downloads and the hand-over of jobs under a model checker, which tries many orders
//! of their threads and of those of the process that run them.
//!
//! An order in which a wake-up is lost ends with threads that wait for ever: the checker fails
//! there. So a test that returns has also shown that its threads ended.

use std::{iter, time::Duration};

use shuttle::{check_pct, check_random};

use super::{
    downloads::{Download, Downloads, IN_FLIGHT},
    job::{Announced, Job, Jobs, Kind, Timing, Work},
    owners::Owners,
};
use crate::{
    device::{Behind, Device, Lane, Mark, Piece, Stream},
    error::{Error, Result},
    host::executor::{Executor, Task},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        thread,
    },
};

/// Orders tried per test, by each of two strategies.
const ORDERS: usize = 1000;
/// How many times a thread is overtaken at a place that matters, in the second strategy.
const CHANGES: usize = 3;
/// The model has no timeouts.
const EVER: Duration = Duration::from_secs(1);

fn check(body: impl Fn() + Send + Sync + Clone + 'static) {
    check_random(body.clone(), ORDERS);
    check_pct(body, ORDERS, CHANGES);
}

/// A device whose copies end one after the other, on a thread of its own.
#[derive(Default)]
struct Late {
    state: Mutex<LateState>,
    changed: Condvar,
}

#[derive(Default)]
struct LateState {
    /// The sources of the copies that were enqueued.
    sources: Vec<u64>,
    /// How many have ended.
    done: usize,
    /// For each event the copies before it.
    events: [usize; 2 * IN_FLIGHT],
    /// The source of the copy that fails.
    fails_at: Option<u64>,
    quit: bool,
}

impl Late {
    fn run(&self) {
        let mut state = self.state.lock().expect("no panic");
        loop {
            while !state.quit && state.done == state.sources.len() {
                state = self.changed.wait(state).expect("no panic");
            }
            if state.done == state.sources.len() {
                return;
            }
            state.done += 1;
            self.changed.notify_all();
        }
    }

    fn quit(&self) {
        self.state.lock().expect("no panic").quit = true;
        self.changed.notify_all();
    }
}

// SAFETY: it copies nothing.
unsafe impl Device for Late {
    fn attach(&self) -> Result<()> {
        Ok(())
    }

    fn detach(&self) {}

    unsafe fn copy(&self, _: Lane, source: u64, _: *mut u8, _: usize) -> Result<()> {
        let mut state = self.state.lock().expect("no panic");
        if state.fails_at == Some(source) {
            return Err(Error::value("the device is out of order"));
        }
        state.sources.push(source);
        assert!(state.sources.len() - state.done <= IN_FLIGHT, "too many copies at once");
        self.changed.notify_all();
        Ok(())
    }

    fn prepare_checksums(&self) -> Result<()> {
        Ok(())
    }

    unsafe fn checksums(&self, _: Behind, _: &[Piece], _: u64) -> Result<()> {
        Ok(())
    }

    fn record(&self, _: Lane, event: usize) -> Result<()> {
        let mut state = self.state.lock().expect("no panic");
        state.events[event] = state.sources.len();
        Ok(())
    }

    fn wait(&self, event: usize) -> Result<()> {
        let state = self.state.lock().expect("no panic");
        let until = state.events[event];
        drop(self.changed.wait_while(state, |state| state.done < until).expect("no panic"));
        Ok(())
    }

    fn mark(&self, _: Stream) -> Result<Mark> {
        Err(Error::value("no streams in the model"))
    }

    fn order_lane_after(&self, _: Lane, _: Mark) -> Result<()> {
        Ok(())
    }

    fn order_stream_after(&self, _: Stream, _: usize) -> Result<()> {
        Ok(())
    }

    fn drain(&self) -> Result<()> {
        Ok(())
    }

    unsafe fn pin(&self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn unpin(&self, _: usize) {}
}

const PRODUCERS: u64 = 2;
/// More than the device takes at once, in calls of `BATCH`.
const COPIES: u64 = 6;
const BATCH: u64 = 3;
/// Fewer than there are copies.
const PLACES: usize = 4;

/// A queue with producers, one after the other of whose calls waits for room and queues a batch;
/// what they said, the device, and the queue.
fn produce(fails_at: Option<u64>) -> (Vec<Result<()>>, Arc<Late>, Arc<Downloads>) {
    let device = Arc::new(Late::default());
    device.state.lock().expect("no panic").fails_at = fails_at;
    let issuers = Executor::start("issuer", 1, 2).expect("a thread");
    let downloads =
        Arc::new(Downloads::new(Arc::clone(&device) as Arc<dyn Device>, 0, PLACES, issuers));
    let copier = {
        let device = Arc::clone(&device);
        thread::spawn(move || device.run())
    };
    let turn = Arc::new(Mutex::new(()));
    let producers: Vec<_> = (0..PRODUCERS)
        .map(|producer| {
            let (downloads, turn) = (Arc::clone(&downloads), Arc::clone(&turn));
            thread::spawn(move || -> Result<()> {
                for first in (0..COPIES).step_by(BATCH as usize) {
                    let copy = |number| Download::Copy {
                        source: producer * COPIES + first + number,
                        target: 0,
                        nbytes: 0,
                        event: None,
                    };
                    let ticket = {
                        let _turn = turn.lock().expect("no panic");
                        assert!(downloads.wait_for_room(BATCH as usize, EVER)?);
                        // SAFETY: nothing is copied.
                        unsafe { downloads.push((0..BATCH).map(copy))? }
                    };
                    downloads.wait(ticket + BATCH - 1)?;
                }
                Ok(())
            })
        })
        .collect();
    let said = producers.into_iter().map(|one| one.join().expect("no panic")).collect();
    downloads.join();
    issuers.quit();
    device.quit();
    copier.join().expect("no panic");
    (said, device, downloads)
}

#[test]
fn copies_are_handed_over_once_in_order_and_calls_stay_whole() {
    check(|| {
        let (said, device, _) = produce(None);
        assert!(said.iter().all(Result::is_ok));
        let sources = device.state.lock().expect("no panic").sources.clone();
        for producer in 0..PRODUCERS {
            let its = sources.iter().copied().filter(|source| source / COPIES == producer);
            assert!(its.eq(producer * COPIES..(producer + 1) * COPIES), "{sources:?}");
        }
        for call in sources.chunks(BATCH as usize) {
            assert!(call.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{sources:?}");
        }
    });
}

#[test]
fn a_copy_that_fails_ends_every_wait() {
    check(|| {
        let (said, device, downloads) = produce(Some(BATCH + 1));
        assert!(said[0].is_err(), "its copy was never issued");
        assert!(downloads.check().is_err() && downloads.wait_for_room(1, EVER).is_err());
        let sources = device.state.lock().expect("no panic").sources.clone();
        assert!(!sources.contains(&(BATCH + 1)) && !sources.contains(&(BATCH + 2)));
    });
}

/// Work that takes some turns, and fails or panics at one job.
struct Fake {
    /// The number of the job that is worked on.
    job: usize,
    fails_at: Option<usize>,
    panics: bool,
    /// For each job whether its upload is enqueued.
    enqueued: Arc<Vec<AtomicBool>>,
    /// Jobs whose upload has ended.
    uploaded: Arc<AtomicUsize>,
    jobs: Arc<Jobs>,
}

impl Work for Fake {
    fn step(&mut self, job: &Job) -> Result<Timing> {
        assert_eq!(job.generation, Some(self.job), "jobs come in order");
        assert_eq!(self.uploaded.load(Ordering::SeqCst), self.job, "the one before is uploaded");
        if self.fails_at == Some(self.job) {
            assert!(!self.panics, "out of its mind");
            return Err(Error::value("out of order"));
        }
        thread::yield_now();
        self.enqueued[self.job].store(true, Ordering::SeqCst);
        self.jobs.notify();
        Ok(Timing::default())
    }

    fn commit(&mut self, _: &Job) -> Result<()> {
        Ok(())
    }

    fn upload(&mut self) -> Result<()> {
        thread::yield_now();
        self.uploaded.fetch_add(1, Ordering::SeqCst);
        self.job += 1;
        Ok(())
    }
}

impl Task for Mutex<Fake> {
    fn run(&self) {
        let mut work = self.lock().unwrap_or_else(PoisonError::into_inner);
        let jobs = Arc::clone(&work.jobs);
        jobs.advance(&mut *work);
    }
}

/// Says which job was uploaded before it was dropped.
struct Lease(usize, Arc<AtomicUsize>);

impl Drop for Lease {
    fn drop(&mut self) {
        assert!(self.1.load(Ordering::SeqCst) > self.0, "returned before its upload has ended");
    }
}

const JOBS: usize = 3;

/// Submits jobs, one as soon as the one before is not busy, beside a thread that waits for each
/// one's upload; what both said, and how much was returned.
fn hand_over(fails_at: Option<usize>, panics: bool) -> [Result<()>; 2] {
    let movers = Executor::start("mover", 1, 2).expect("a thread");
    let jobs = Arc::new(Jobs::new(0, movers));
    let enqueued = Arc::new((0..JOBS).map(|_| AtomicBool::new(false)).collect::<Vec<_>>());
    let uploaded = Arc::new(AtomicUsize::new(0));
    let mover: Arc<dyn Task> = Arc::new(Mutex::new(Fake {
        job: 0,
        fails_at,
        panics,
        enqueued: Arc::clone(&enqueued),
        uploaded: Arc::clone(&uploaded),
        jobs: Arc::clone(&jobs),
    }));
    let waiter = {
        let jobs = Arc::clone(&jobs);
        thread::spawn(move || -> Result<()> {
            for one in &*enqueued {
                assert!(jobs.wait_until(EVER, || one.load(Ordering::SeqCst))?);
            }
            Ok(())
        })
    };
    let mut returned = 0;
    let mut submit = |number: usize| -> Result<()> {
        jobs.check_idle()?;
        // What has failed never is.
        let lease: Option<Owners> =
            fails_at.is_none().then(|| Box::new(Lease(number, Arc::clone(&uploaded))) as Owners);
        let announced = Some(Announced { generation: number });
        jobs.submit(announced, Kind::Whole, &[], lease, 0);
        movers.wake(&mover);
        assert!(jobs.wait_until_idle(EVER)?);
        returned += iter::from_fn(|| jobs.pop_returned()).count();
        Ok(())
    };
    let said = (0..JOBS).try_for_each(&mut submit);
    let waited = waiter.join().expect("no panic");
    movers.join(&mover);
    movers.quit();
    if fails_at.is_none() {
        returned += iter::from_fn(|| jobs.pop_returned()).count();
        assert_eq!(returned, JOBS, "all that was lent is returned");
    }
    [said, waited]
}

#[test]
fn jobs_are_handed_over_in_order_and_return_what_was_lent() {
    check(|| assert!(hand_over(None, false).iter().all(Result::is_ok)));
}

#[test]
fn a_job_that_fails_ends_every_wait() {
    for panics in [false, true] {
        check(move || {
            let said = hand_over(Some(1), panics);
            assert!(said.iter().all(Result::is_err), "{said:?}");
        });
    }
}
