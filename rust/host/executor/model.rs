//! The threads that run tasks under a model checker, which tries many orders of them.
//!
//! An order in which a wake-up is lost ends with threads that wait for ever: the checker fails
//! there.

use shuttle::{check_pct, check_random};

use super::{Executor, Task};
use crate::sync::{
    Arc, Condvar, Mutex,
    atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

/// Orders tried per test, by each of two strategies.
const ORDERS: usize = 1000;
/// How many times a thread is overtaken at a place that matters, in the second strategy.
const CHANGES: usize = 3;

fn check(body: impl Fn() + Send + Sync + Clone + 'static) {
    check_random(body.clone(), ORDERS);
    check_pct(body, ORDERS, CHANGES);
}

/// Notes how much of what was done before a wake-up its runs have seen.
#[derive(Default)]
struct Counts {
    done: AtomicUsize,
    seen: AtomicUsize,
    is_running: AtomicBool,
    /// Whether two threads have run it at once. A panic would end with the run.
    has_overlapped: AtomicBool,
}

impl Task for Counts {
    fn run(&self) {
        if self.is_running.swap(true, Ordering::SeqCst) {
            self.has_overlapped.store(true, Ordering::SeqCst);
        }
        thread::yield_now();
        self.seen.store(self.done.load(Ordering::SeqCst), Ordering::SeqCst);
        self.is_running.store(false, Ordering::SeqCst);
    }
}

#[test]
fn each_wake_is_followed_by_a_run_and_a_joined_task_is_nobodys() {
    check(|| {
        let executor = Executor::start("task", 1, 2).expect("a thread");
        let wakers: Vec<_> = (0..2)
            .map(|_| {
                thread::spawn(move || {
                    let counts = Arc::new(Counts::default());
                    let task = Arc::clone(&counts) as Arc<dyn Task>;
                    for _ in 0..2 {
                        counts.done.fetch_add(1, Ordering::SeqCst);
                        executor.wake(&task);
                    }
                    executor.join(&task);
                    assert!(!counts.has_overlapped.load(Ordering::SeqCst));
                    assert_eq!(counts.seen.load(Ordering::SeqCst), 2);
                    assert_eq!(Arc::strong_count(&counts), 2, "this thread's");
                })
            })
            .collect();
        for waker in wakers {
            waker.join().expect("no assertion fails");
        }
        executor.quit();
    });
}

/// Ends when a later one has run.
struct Waits {
    has_run: Arc<(Mutex<bool>, Condvar)>,
}

impl Task for Waits {
    fn run(&self) {
        let (has_run, changed) = &*self.has_run;
        let is_missing = |has_run: &mut bool| !*has_run;
        drop(changed.wait_while(has_run.lock().expect("no panic"), is_missing));
    }
}

struct Frees {
    has_run: Arc<(Mutex<bool>, Condvar)>,
}

impl Task for Frees {
    fn run(&self) {
        *self.has_run.0.lock().expect("no panic") = true;
        self.has_run.1.notify_all();
    }
}

#[test]
fn a_task_that_waits_for_a_later_one_is_relieved() {
    check(|| {
        let executor = Executor::start("task", 1, 1).expect("a thread");
        let has_run = Arc::default();
        let waits: Arc<dyn Task> = Arc::new(Waits { has_run: Arc::clone(&has_run) });
        let frees: Arc<dyn Task> = Arc::new(Frees { has_run });
        executor.wake(&waits);
        executor.wake(&frees);
        executor.relieve();
        executor.join(&waits);
        executor.join(&frees);
        executor.quit();
    });
}
