//! Files of tensors.

use std::{
    collections::VecDeque,
    os::fd::BorrowedFd,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use pyo3::prelude::*;
use rustix::io::Errno;

use super::{logging::run, swap::engine_named};
use crate::{
    error::{Error, Result},
    tier::{
        io::files::{Files, Options, Place, Transfer},
        volume::QUEUE_DEPTH,
    },
};

/// How long a wait leaves signals alone.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// What is in flight, and what keeps its memory.
struct Pending {
    transfer: Transfer,
    owner: Py<PyAny>,
}

impl Pending {
    /// Lets go of the memory, unless a drive may still use it: then it is never freed.
    fn release(self) {
        if !self.transfer.is_over() {
            std::mem::forget(self.owner);
        }
    }
}

/// Reads and writes of memory from and to files, several in flight. Any offset, size and address.
///
/// Args:
///     block_bytes: what one call moves at most.
///     queue_depth: calls in flight at most.
///     io_engine: "auto", "io_uring" or "positional".
///     io_timeout: seconds after which drives that have ended nothing count as gone.
///
/// Raises:
///     ValueError: for arguments that cannot work.
///     OSError: where io_uring is asked for and not there.
#[pyclass(name = "Files", module = "stepwell._core", frozen)]
pub(super) struct PyFiles {
    files: Files,
    pending: Mutex<VecDeque<Pending>>,
    /// Of what was waited for, and not told yet: a wait may be interrupted.
    ended: Mutex<Ended>,
    io_timeout: Duration,
}

#[derive(Default)]
struct Ended {
    num: usize,
    num_failed: usize,
    failure: Option<Error>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PyFiles {
    /// Waits until all of these are over, and lets go of them one by one.
    fn end(&self, py: Python<'_>, waited_for: &mut VecDeque<Pending>) -> PyResult<()> {
        let mut progressed = Instant::now();
        let mut remaining = 0;
        while let Some(Pending { transfer, .. }) = waited_for.front() {
            match py.detach(|| transfer.wait(SIGNAL_INTERVAL)) {
                Ok(None) => {
                    py.check_signals()?;
                    let now = waited_for.iter().map(|each| each.transfer.remaining()).sum();
                    if std::mem::replace(&mut remaining, now) != now {
                        progressed = Instant::now();
                    } else if progressed.elapsed() >= self.io_timeout {
                        return Err(self.no_answer(transfer).into());
                    }
                    continue;
                }
                Ok(Some(())) => {}
                Err(error) => {
                    let mut ended = lock(&self.ended);
                    ended.num_failed += 1;
                    ended.failure.get_or_insert(error);
                }
            }
            lock(&self.ended).num += 1;
            waited_for.pop_front().into_iter().for_each(Pending::release);
        }
        Ok(())
    }

    fn no_answer(&self, transfer: &Transfer) -> Error {
        Error::os(
            format!(
                "no drive has answered for `{}` s ({transfer:?}); what is in flight stays so, and \
                 its memory is kept",
                self.io_timeout.as_secs_f64()
            ),
            Errno::TIMEDOUT,
        )
    }
}

#[pymethods]
impl PyFiles {
    #[new]
    #[pyo3(signature = (
        *, block_bytes=1 << 20, queue_depth=QUEUE_DEPTH, io_engine="auto", io_timeout=60.0
    ))]
    fn new(
        py: Python<'_>,
        block_bytes: usize,
        queue_depth: usize,
        io_engine: &str,
        io_timeout: f64,
    ) -> PyResult<Self> {
        let io_timeout = super::swap::seconds("io_timeout", io_timeout)?;
        let options =
            Options { engine: engine_named(io_engine)?, block_bytes, queue_depth, between: None };
        let files = run(py, || Files::new(&options))?;
        Ok(Self { files, pending: Mutex::default(), ended: Mutex::default(), io_timeout })
    }

    /// Whether io_uring moves the bytes.
    #[getter]
    fn has_rings(&self) -> bool {
        self.files.has_rings()
    }

    /// Begins to read `nbytes` from `offset` of a file on.
    ///
    /// Args:
    ///     path: of the file.
    ///     offset: in bytes.
    ///     address: of the memory; its bytes are nobody else's until `wait` has returned.
    ///     nbytes: how many.
    ///     owner: what keeps the memory alive; kept until the read is over.
    ///
    /// Raises:
    ///     OSError: where the file cannot be opened.
    #[pyo3(signature = (path, *, offset, address, nbytes, owner))]
    fn read(
        &self,
        py: Python<'_>,
        path: PathBuf,
        offset: u64,
        address: usize,
        nbytes: usize,
        owner: Py<PyAny>,
    ) -> Result<()> {
        let transfer = py.detach(|| {
            let memory = std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: the caller vouches for the memory; `owner` is kept until the read is over.
            unsafe { self.files.read(&path, offset, memory, nbytes) }
        })?;
        lock(&self.pending).push_back(Pending { transfer, owner });
        Ok(())
    }

    /// Begins to write `nbytes` to `offset` of a file on, which is made if it is not there.
    ///
    /// Args:
    ///     place: the path of the file, or a descriptor, which stays the caller's.
    ///     offset: in bytes.
    ///     address: of the memory, which is not written to until `wait` has returned.
    ///     nbytes: how many.
    ///     owner: what keeps the memory alive; kept until the write is over.
    ///
    /// Raises:
    ///     OSError: where the file cannot be opened.
    #[pyo3(signature = (place, *, offset, address, nbytes, owner))]
    fn write(
        &self,
        py: Python<'_>,
        place: PyPlace,
        offset: u64,
        address: usize,
        nbytes: usize,
        owner: Py<PyAny>,
    ) -> Result<()> {
        let transfer = py.detach(|| {
            let memory = std::ptr::with_exposed_provenance(address);
            let place = match &place {
                PyPlace::Path(path) => Place::Path(path),
                PyPlace::Descriptor(number) if *number < 0 => {
                    let text = format!("cannot write to the descriptor `{number}`");
                    return Err(Error::os(text, Errno::BADF));
                }
                PyPlace::Descriptor(number) => {
                    // SAFETY: it is the caller's, and open during this call; if not, `dup` says so.
                    let descriptor = unsafe { BorrowedFd::borrow_raw(*number) };
                    Place::Descriptor(descriptor)
                }
            };
            // SAFETY: the caller vouches for the memory; `owner` is kept until the write is over.
            unsafe { self.files.write(place, offset, memory, nbytes) }
        })?;
        lock(&self.pending).push_back(Pending { transfer, owner });
        Ok(())
    }

    /// How many reads and writes `wait` would wait for.
    #[getter]
    fn num_pending(&self) -> usize {
        lock(&self.pending).len()
    }

    /// Waits until all that was begun is over. Interrupted by a signal it goes on where it was when
    /// it is called again.
    ///
    /// Returns:
    ///     how many reads and writes that were.
    ///
    /// Raises:
    ///     OSError: where one has failed: the first of them. All are over, and forgotten. Where
    ///         drives do not answer, they are not over.
    fn wait(&self, py: Python<'_>) -> PyResult<usize> {
        let mut waited_for = std::mem::take(&mut *lock(&self.pending));
        let outcome = self.end(py, &mut waited_for);
        let mut pending = lock(&self.pending);
        // What was not waited for to the end, before what was begun meanwhile.
        waited_for.append(&mut pending);
        *pending = waited_for;
        drop(pending);
        outcome?;
        let Ended { num, num_failed, failure } = std::mem::take(&mut *lock(&self.ended));
        match failure {
            None => Ok(num),
            Some(Error::Os { context, source }) if num_failed > 1 => {
                let context = format!("{context} (and {} more have failed)", num_failed - 1);
                Err(Error::os(context, source).into())
            }
            Some(error) => Err(error.into()),
        }
    }
}

impl PyFiles {
    /// Waits until what is in flight is over, or drives have not answered for long.
    fn wait_for_the_last(&self, pending: &VecDeque<Pending>) {
        let begin = Instant::now();
        for Pending { transfer, .. } in pending {
            while !transfer.is_over() && begin.elapsed() < self.io_timeout {
                if !matches!(transfer.wait(SIGNAL_INTERVAL), Ok(None)) {
                    break;
                }
            }
        }
    }
}

impl Drop for PyFiles {
    fn drop(&mut self) {
        // What is in flight uses memory that may be freed after this. No caller is left to be told.
        let pending = std::mem::take(&mut *lock(&self.pending));
        if pending.iter().any(|each| !each.transfer.is_over()) {
            // The interpreter goes on meanwhile. Where it is ending, no other thread needs it.
            let waited = Python::try_attach(|py| py.detach(|| self.wait_for_the_last(&pending)));
            if waited.is_none() {
                self.wait_for_the_last(&pending);
            }
        }
        pending.into_iter().for_each(Pending::release);
    }
}

/// A path, or the number of a descriptor.
#[derive(FromPyObject)]
pub(super) enum PyPlace {
    Descriptor(i32),
    Path(PathBuf),
}
