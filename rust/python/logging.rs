//! The core's log records on their way to Python's `logging`.
//!
//! A record waits in a queue, whatever thread makes it and whatever that holds. Calls hand over
//! what waits when they end ([`run`], [`answer`]): a handler is Python, where Ctrl-C lands, and
//! what it raises is the exception of the call. Atomic calls (`Store.submit`, `Store.take`,
//! `Store.step`, `adam_step`) hand over nothing: their records, and those of other threads, come
//! with the next call that does, or at exit.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, TryLockError,
        atomic::{AtomicUsize, Ordering},
    },
};

use log::{Level, LevelFilter, Metadata, Record};
use pyo3::{prelude::*, types::PyCFunction};

/// What calls logger and records of the core.
const NAME: &str = "stepwell";

/// The most records that wait; more go to stderr.
const WAITING_MAX: usize = 256;

/// How often a lock is tried that is held for some instructions. One that another thread held while
/// this process was forked off stays locked.
const TRIES: usize = 1000;

static WAITING: Mutex<VecDeque<(Level, String)>> = Mutex::new(VecDeque::new());
/// How many wait: most calls find none, and take no lock.
static NUM_WAITING: AtomicUsize = AtomicUsize::new(0);

fn waiting() -> Option<MutexGuard<'static, VecDeque<(Level, String)>>> {
    for _ in 0..TRIES {
        match WAITING.try_lock() {
            Ok(waiting) => return Some(waiting),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

struct Queue;

impl log::Log for Queue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == NAME
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let text = record.args().to_string();
        match waiting() {
            Some(mut waiting) if waiting.len() < WAITING_MAX => {
                waiting.push_back((record.level(), text));
                NUM_WAITING.store(waiting.len(), Ordering::Release);
            }
            _ => eprintln!("{NAME}: {text}"),
        }
    }

    fn flush(&self) {}
}

/// The record that has waited longest.
fn next() -> Option<(Level, String)> {
    if NUM_WAITING.load(Ordering::Acquire) == 0 {
        return None;
    }
    let mut waiting = waiting()?;
    let record = waiting.pop_front();
    NUM_WAITING.store(waiting.len(), Ordering::Release);
    record
}

/// Hands over what waits.
///
/// # Errors
/// What a handler raises. Later records go on waiting.
fn hand_over(py: Python<'_>) -> PyResult<()> {
    while let Some((level, text)) = next() {
        let level = match level {
            Level::Error => 40,
            Level::Warn => 30,
            Level::Info => 20,
            Level::Debug | Level::Trace => 10,
        };
        let logger = py.import("logging")?.call_method1("getLogger", (NAME,))?;
        logger.call_method1("log", (level, text))?;
    }
    Ok(())
}

/// Queues the core's records from now on, and has those that wait at exit handed over.
pub(super) fn connect(py: Python<'_>) -> PyResult<()> {
    if log::set_logger(&Queue).is_err() {
        return Ok(());
    }
    log::set_max_level(LevelFilter::Info);
    // Its own function at exit comes behind this one.
    py.import("logging")?;
    let last = PyCFunction::new_closure(py, None, None, |args, _| hand_over(args.py()))?;
    py.import("atexit")?.call_method1("register", (last,))?;
    Ok(())
}

/// The outcome of a call that ends, behind the records that wait. An exception of a handler comes
/// in its place.
pub(super) fn answer<T, E: Into<PyErr>>(
    py: Python<'_>,
    outcome: std::result::Result<T, E>,
) -> PyResult<T> {
    match (outcome, hand_over(py)) {
        (Ok(value), Ok(())) => Ok(value),
        (Err(error), Ok(())) => Err(error.into()),
        (Ok(_), Err(raised)) => Err(raised),
        (Err(error), Err(raised)) => {
            raised.set_context(py, Some(error.into()));
            Err(raised)
        }
    }
}

/// As [`answer`], of what `call` returns without the GIL.
pub(super) fn run<T: Send, E: Into<PyErr> + Send>(
    py: Python<'_>,
    call: impl FnOnce() -> std::result::Result<T, E> + Send,
) -> PyResult<T> {
    let outcome = py.detach(call);
    answer(py, outcome)
}
