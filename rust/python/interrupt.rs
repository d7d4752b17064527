//! Work of seconds that Ctrl-C ends.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use pyo3::prelude::*;

use super::logging::answer;
use crate::error::{Error, Result};

/// How often signals are looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Runs it on another thread, which is told to stop by a flag where a signal's handler raises.
pub(super) fn interruptible<T: Send>(
    py: Python<'_>,
    run: impl FnOnce(&AtomicBool) -> Result<T> + Send,
) -> PyResult<T> {
    let is_interrupted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| run(&is_interrupted));
        while !running.is_finished() {
            py.detach(|| std::thread::park_timeout(LOOK_INTERVAL));
            if let Err(signal) = py.check_signals() {
                is_interrupted.store(true, Ordering::Relaxed);
                let _ = py.detach(|| running.join());
                return Err(signal);
            }
        }
        match running.join() {
            Ok(outcome) => answer(py, outcome),
            Err(_) => Err(Error::value("a thread of the core has panicked").into()),
        }
    })
}
