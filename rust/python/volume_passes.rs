//! Volumes that are measured.

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use pyo3::prelude::*;

use super::{
    interrupt::interruptible,
    swap::{durability_named, engine_named, seconds},
};
use crate::{
    error::Error,
    host::pool::Pool,
    tier::volume::{
        Location, Options, QUEUE_DEPTH, STRIPE_BYTES, Shape, Volume, check_records,
        passes::{Passes, Pattern},
        unique_name,
    },
};

/// A volume of records of one size, to measure what it moves. Its files are removed with it.
///
/// Args:
///     drives: a folder or a block device for each member.
///     record_nbytes: bytes of a record.
///     num_records: how many.
///     num_buffers: records in flight.
///     weights: the bandwidth of each member; empty: all are alike.
///     stripe_bytes: the most bytes of a record that lie together on one member.
///     durability: "commit" or "none".
///     io_engine: "auto", "io_uring" or "positional".
///     queue_depth: operations that each drive is given at once.
///     io_timeout: seconds that a drive may take to answer.
///
/// Raises:
///     ValueError: for arguments that cannot work.
///     OSError: where a drive is full or fails.
#[pyclass(name = "VolumePasses", module = "stepwell._core", frozen)]
pub(super) struct PyVolumePasses(Mutex<Option<Passes>>);

#[pymethods]
impl PyVolumePasses {
    #[new]
    #[pyo3(signature = (
        drives, *, record_nbytes, num_records, num_buffers, weights=Vec::new(),
        stripe_bytes=STRIPE_BYTES, durability="none", io_engine="auto", queue_depth=QUEUE_DEPTH,
        io_timeout=60.0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn new(
        py: Python<'_>,
        drives: Vec<PathBuf>,
        record_nbytes: usize,
        num_records: usize,
        num_buffers: usize,
        weights: Vec<u32>,
        stripe_bytes: usize,
        durability: &str,
        io_engine: &str,
        queue_depth: usize,
        io_timeout: f64,
    ) -> PyResult<Self> {
        let io_timeout = seconds("io_timeout", io_timeout)?;
        let location = Location { name: unique_name()?, drives };
        let durability = durability_named(durability)?;
        check_records(num_records)?;
        let record_nbytes = vec![record_nbytes; num_records];
        let shape = Shape { record_nbytes, weights, stripe_bytes, durability };
        let options = Options {
            engine: engine_named(io_engine)?,
            queue_depth,
            num_buffers,
            io_timeout,
            ..Options::default()
        };
        let passes = interruptible(py, |is_interrupted| {
            let volume = Volume::create(&location, &shape, &options, Pool::global()?)?;
            Passes::new(volume, num_buffers, io_timeout, is_interrupted)
        })?;
        Ok(Self(Mutex::new(Some(passes))))
    }

    /// One pass over all records.
    ///
    /// Args:
    ///     pattern: "write", "read" or "swap", which reads and writes each record.
    ///
    /// Returns:
    ///     the bytes that were read, and written.
    ///
    /// Raises:
    ///     ValueError: for another pattern, or after `close`.
    ///     OSError: where a drive fails.
    fn run(&self, py: Python<'_>, pattern: &str) -> PyResult<(u64, u64)> {
        let pattern = match pattern {
            "write" => Pattern::Write,
            "read" => Pattern::Read,
            "swap" => Pattern::Swap,
            _ => {
                let text = format!("pattern is `{pattern}`, expected write, read or swap");
                return Err(Error::value(text).into());
            }
        };
        interruptible(py, |is_interrupted| {
            let mut passes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let passes = passes.as_mut().ok_or_else(|| {
                Error::value("a volume is measured after `close`, expected before")
            })?;
            let before = passes.volume().bytes_moved();
            passes.pass(pattern, is_interrupted)?;
            let after = passes.volume().bytes_moved();
            Ok((after.0 - before.0, after.1 - before.1))
        })
    }

    /// Whether io_uring moves the bytes; None after `close`.
    #[getter]
    fn has_rings(&self) -> Option<bool> {
        let passes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        passes.as_ref().map(|passes| passes.volume().has_rings())
    }

    /// Whether the page cache is bypassed on every member; None after `close`.
    #[getter]
    fn is_direct(&self) -> Option<bool> {
        let passes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        passes.as_ref().map(|passes| passes.volume().is_direct())
    }

    /// Removes the files.
    fn close(&self, py: Python<'_>) {
        let passes = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(passes));
    }
}
