//! State on a volume, and volumes as people look at them.

use std::{
    num::NonZeroU64,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use pyo3::prelude::*;

use super::{
    adam::PyAdamTensor,
    host::PyAddressSpace,
    interrupt::interruptible,
    logging::{answer, run},
    tensor::PyTensorView,
};
use crate::{
    error::{Error, Result},
    host::pool::Pool,
    tier::{
        swap::{Catalog, Config, Swap},
        volume::{
            Durability, EngineKind, Location, Options, QUEUE_DEPTH, STRIPE_BYTES, Volume,
            block_device,
            found::{self, Found},
            unique_name,
        },
    },
};

/// How long a thread that has to look for signals leaves them alone.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(500);

/// The state of some parameters, on a volume and in host memory of its own.
///
/// Args:
///     drives: a folder or a block device for each member of the volume.
///     places: the parameters; their state is at addresses of `addresses`.
///     addresses: what the places are made of.
///     name: of the volume; if None, one that no other job has.
///     weights: the bandwidth of each member; empty: all are alike.
///     stripe_bytes: the most bytes of a record that lie together on one member.
///     durability: "commit", a crash leaves the last committed step whole; or "none".
///     keep: whether the files stay.
///     resume: whether to go on from the volume, where it has a committed step.
///     step: of a volume that is resumed, the committed step to go on from: the last one, or the
///         one before it, if nothing was written since; None: the last one.
///     counts_each_step: whether a step counts that changes nothing here.
///     commit_interval: steps from one commit to the next. The first step is committed too.
///     run: what its commits say of the run that makes them; the same for the volumes of all ranks.
///     packed: the places whose fp32 masters are packed beside their bfloat16 weights. These stay
///         where they are, and only steps write them.
///     ram_nbytes: host memory for the state of the first chunks.
///     buffers_nbytes_max: the most host memory for what is on its way.
///     workers: how many step.
///     io_engine: "auto", "io_uring" or "positional".
///     queue_depth: operations that each drive is given at once.
///     io_timeout: seconds that a drive may take to answer.
///
/// Raises:
///     ValueError: for arguments that cannot work, or a volume of other parameters.
///     OSError: where a drive is full, or a member is missing, used or damaged.
#[pyclass(name = "Swap", module = "stepwell._core", frozen)]
pub(super) struct PySwap {
    /// None: it was closed.
    swap: Mutex<Option<Arc<Swap>>>,
    /// What the commit says that it goes on from; None: it is new.
    resumed: Option<Catalog>,
    /// No other memory gets the addresses of the places.
    _addresses: Py<PyAddressSpace>,
}

impl PySwap {
    pub(super) fn swap(&self) -> Result<Arc<Swap>> {
        let swap = self.swap.lock().unwrap_or_else(PoisonError::into_inner);
        swap.clone().ok_or_else(|| {
            Error::value("the volume of an optimizer is used after it was closed, expected before")
        })
    }
}

pub(super) fn durability_named(name: &str) -> Result<Durability> {
    match name {
        "commit" => Ok(Durability::Commit),
        "none" => Ok(Durability::None),
        _ => Err(Error::value(format!("durability is `{name}`, expected commit or none"))),
    }
}

pub(super) fn engine_named(name: &str) -> Result<EngineKind> {
    match name {
        "auto" => Ok(EngineKind::Auto),
        "io_uring" => Ok(EngineKind::IoUring),
        "positional" => Ok(EngineKind::Positional),
        _ => Err(Error::value(format!(
            "io_engine is `{name}`, expected auto, io_uring or positional"
        ))),
    }
}

pub(super) fn seconds(name: &str, seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Error::value(format!("{name} is `{seconds}`, expected seconds from 0 on")))
}

#[pymethods]
impl PySwap {
    #[new]
    #[pyo3(signature = (
        drives, places, *, addresses, name=None, weights=Vec::new(), stripe_bytes=STRIPE_BYTES,
        durability="commit", keep=false, resume=false, step=None, counts_each_step=false,
        commit_interval=NonZeroU64::MIN, identity=0, run=0, packed=Vec::new(), ram_nbytes=0,
        buffers_nbytes_max=1 << 30, workers=None, io_engine="auto", queue_depth=QUEUE_DEPTH,
        io_timeout=60.0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn new(
        py: Python<'_>,
        drives: Vec<PathBuf>,
        places: Vec<PyRef<'_, PyAdamTensor>>,
        addresses: Py<PyAddressSpace>,
        name: Option<String>,
        weights: Vec<u32>,
        stripe_bytes: usize,
        durability: &str,
        keep: bool,
        resume: bool,
        step: Option<u64>,
        counts_each_step: bool,
        commit_interval: NonZeroU64,
        identity: u64,
        run: u64,
        packed: Vec<usize>,
        ram_nbytes: usize,
        buffers_nbytes_max: usize,
        workers: Option<usize>,
        io_engine: &str,
        queue_depth: usize,
        io_timeout: f64,
    ) -> PyResult<Self> {
        let places: Vec<_> = places.iter().map(|place| place.0).collect();
        let io_timeout = seconds("io_timeout", io_timeout)?;
        let location = Location { name: name.map_or_else(unique_name, Ok)?, drives };
        let options = Options {
            engine: engine_named(io_engine)?,
            queue_depth,
            keep,
            io_timeout,
            step,
            // Signals are looked for in between.
            lock_timeout: SIGNAL_INTERVAL,
            ..Options::default()
        };
        let pool = py.detach(Pool::global)?;
        let config = Config {
            location,
            weights,
            stripe_bytes,
            durability: durability_named(durability)?,
            identity,
            run,
            packed,
            ram_nbytes,
            buffers_nbytes_max,
            workers: workers.unwrap_or_else(|| pool.threads()),
            counts_each_step,
            commit_interval,
            options,
        };
        let make = || match resume {
            true => Swap::open(&config, &places, pool),
            false => Swap::create(&config, &places, pool).map(|swap| (swap, None)),
        };
        let mut waited = Duration::ZERO;
        let made = loop {
            match py.detach(make) {
                // What a killed process had submitted is still landing.
                Err(Error::Os { source, .. }) if waited < io_timeout && is_locked(&source) => {
                    waited += SIGNAL_INTERVAL;
                    py.check_signals()?;
                }
                ended => break ended,
            }
        };
        let (swap, resumed) = match made {
            Ok(made) => made,
            Err(error) => return answer(py, Err(error)),
        };
        answer(py, Ok::<_, Error>(()))
            .inspect_err(|_| swap.volume().set_keep(resumed.is_some()))?;
        Ok(Self { swap: Mutex::new(Some(Arc::new(swap))), resumed, _addresses: addresses })
    }

    /// Of a volume that was resumed: how many updates each parameter has seen. None: it is new.
    #[getter]
    fn counts(&self) -> Option<Vec<u64>> {
        self.resumed.as_ref().map(|found| found.counts.clone())
    }

    /// Of a volume that was resumed: the `run` of the commit that it goes on from. None: it is new.
    #[getter]
    fn resumed_run(&self) -> Option<u64> {
        self.resumed.as_ref().map(|found| found.run)
    }

    /// The volume's name.
    #[getter]
    fn name(&self) -> Result<String> {
        Ok(self.swap()?.volume().name().to_owned())
    }

    /// The files of its members.
    #[getter]
    fn paths(&self) -> Result<Vec<PathBuf>> {
        Ok(self.swap()?.volume().paths().to_vec())
    }

    /// The number of the last step that is committed; None: none is.
    #[getter]
    fn step(&self) -> Result<Option<u64>> {
        Ok(self.swap()?.volume().step())
    }

    /// Of a volume that was resumed: the committed step before the one that it was resumed at. It
    /// can go back to it while nothing was written. None: there is none, or it is new.
    #[getter]
    fn step_before(&self) -> Result<Option<u64>> {
        Ok(self.swap()?.volume().step_before())
    }

    /// Whether a commit ends the next step.
    #[getter]
    fn commits_next(&self) -> Result<bool> {
        Ok(self.swap()?.commits_next())
    }

    /// Whether files stay when the volume ends, and it commits steps.
    #[getter]
    fn is_kept(&self) -> bool {
        self.swap().is_ok_and(|swap| swap.is_kept())
    }

    /// Whether the last step that was made is not committed.
    #[getter]
    fn is_behind(&self) -> Result<bool> {
        Ok(self.swap()?.is_behind())
    }

    /// Which of the places have weights that the next commit would lack, unless its step writes
    /// them.
    fn weights_behind(&self) -> Result<Vec<usize>> {
        Ok(self.swap()?.weights_behind())
    }

    /// Writes the weights of a parameter, as its last step has left them, for the next commit. Not
    /// while a step runs.
    ///
    /// Args:
    ///     tensor: which of the places.
    ///     weights: memory of them.
    ///
    /// Raises:
    ///     ValueError: for another dtype or size, or while a step runs.
    ///     OSError: where a drive fails.
    fn write_weights(&self, py: Python<'_>, tensor: usize, weights: &PyTensorView) -> PyResult<()> {
        let (swap, weights) = (self.swap()?, weights.0);
        interruptible(py, |is_interrupted| {
            // SAFETY: the caller vouches for the memory during this call (see TensorView), within
            // which it is read.
            unsafe { swap.write_weights(tensor, weights, is_interrupted) }
        })
        .map(|_| ())
    }

    /// Raises OSError if a step, a write or a commit has failed.
    fn check(&self) -> Result<()> {
        self.swap()?.check()
    }

    /// Commits the last step, if it is not committed. Not while a step runs. Ctrl-C is raised when
    /// that has ended.
    ///
    /// Raises:
    ///     ValueError: while a step runs, or before all `weights_behind` are written.
    ///     OSError: where a drive fails.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let swap = self.swap()?;
        interruptible(py, |_| swap.commit_now())
    }

    /// Bytes of host memory for the state of the first chunks.
    #[getter]
    fn ram_nbytes(&self) -> Result<usize> {
        Ok(self.swap()?.memory_nbytes().0)
    }

    /// Bytes of host memory for what is on its way.
    #[getter]
    fn buffers_nbytes(&self) -> Result<usize> {
        Ok(self.swap()?.memory_nbytes().1)
    }

    /// Bytes that were read from the drives, and written, since it was made.
    #[getter]
    fn bytes_moved(&self) -> Result<(u64, u64)> {
        Ok(self.swap()?.volume().bytes_moved())
    }

    /// Whether io_uring moves the bytes.
    #[getter]
    fn has_rings(&self) -> Result<bool> {
        Ok(self.swap()?.volume().has_rings())
    }

    /// Whether the page cache is bypassed on every member.
    #[getter]
    fn is_direct(&self) -> Result<bool> {
        Ok(self.swap()?.volume().is_direct())
    }

    /// Copies the state of a parameter to memory, as it is after the last step. Not while one runs.
    ///
    /// Args:
    ///     tensor: which of the places.
    ///     to: the parameter with memory for its state; its fingerprints are left alone.
    ///     begin: the first element that is copied; those of its chunk are copied with it.
    ///     end: the element before which copying ends, likewise; None: the last one is copied too.
    ///
    /// Raises:
    ///     ValueError: for another layout, elements that there are not, or while a step runs.
    ///     OSError: where a drive fails.
    #[pyo3(signature = (tensor, to, *, begin=0, end=None))]
    fn read(
        &self,
        py: Python<'_>,
        tensor: usize,
        to: &PyAdamTensor,
        begin: usize,
        end: Option<usize>,
    ) -> PyResult<()> {
        let (swap, to) = (self.swap()?, to.0);
        let elements = begin..end.unwrap_or_else(|| to.layout().numel());
        interruptible(py, |is_interrupted| {
            // SAFETY: the caller vouches for the memory during this call (see TensorView), within
            // which the reading ends.
            unsafe { swap.read(tensor, &to, elements, is_interrupted) }
        })
        .map(|_| ())
    }

    /// Copies the weights of a parameter's last committed step to memory, where it was stepped.
    ///
    /// Args:
    ///     tensor: which of the places.
    ///     to: memory for the weight.
    ///
    /// Raises:
    ///     ValueError: for another dtype or size, or without durability "commit".
    ///     OSError: where a drive fails.
    fn read_weights(&self, py: Python<'_>, tensor: usize, to: &PyTensorView) -> PyResult<()> {
        let (swap, to) = (self.swap()?, to.0);
        interruptible(py, |is_interrupted| {
            // SAFETY: the caller vouches for the memory during this call (see TensorView), within
            // which the reading ends.
            unsafe { swap.read_weights(tensor, to, is_interrupted) }
        })
        .map(|_| ())
    }

    /// Removes the files, unless they are kept, and uses them no more.
    ///
    /// Args:
    ///     keep: whether they are kept; None: as the volume was made.
    #[pyo3(signature = (*, keep=None))]
    fn close(&self, py: Python<'_>, keep: Option<bool>) -> PyResult<()> {
        let swap = self.swap.lock().unwrap_or_else(PoisonError::into_inner).take();
        run(py, || {
            if let Some(swap) = swap {
                swap.tell_of_uncommitted();
                if let Some(keep) = keep {
                    swap.volume().set_keep(keep);
                }
                swap.volume().remove_files();
            }
            Ok::<_, Error>(())
        })
    }
}

fn is_locked(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::WouldBlock
}

/// Bytes of the buffers of a swap, at most; the arguments are its own.
///
/// Raises:
///     ValueError: for another durability.
#[pyfunction]
#[pyo3(signature = (drives, places, *, durability="commit", packed=Vec::new(),
    buffers_nbytes_max=1 << 30, workers=None))]
pub(super) fn swap_buffers_nbytes(
    drives: Vec<PathBuf>,
    places: Vec<PyRef<'_, PyAdamTensor>>,
    durability: &str,
    packed: Vec<usize>,
    buffers_nbytes_max: usize,
    workers: Option<usize>,
) -> Result<usize> {
    let places: Vec<_> = places.iter().map(|place| place.0).collect();
    let config = Config {
        location: Location { name: String::new(), drives },
        weights: Vec::new(),
        stripe_bytes: 0,
        durability: durability_named(durability)?,
        identity: 0,
        run: 0,
        packed,
        ram_nbytes: 0,
        buffers_nbytes_max,
        workers: workers.map_or_else(|| Pool::global().map(Pool::threads), Ok)?,
        counts_each_step: false,
        commit_interval: NonZeroU64::MIN,
        options: Options::default(),
    };
    Ok(config.buffers_nbytes(&places))
}

/// A file or a block device of a volume's member, as it was found.
#[pyclass(name = "MemberFile", module = "stepwell._core", frozen)]
pub(super) struct PyMemberFile(Found);

#[pymethods]
impl PyMemberFile {
    /// Where it is.
    #[getter]
    fn path(&self) -> PathBuf {
        self.0.path.clone()
    }

    /// The folder that the file is in, or the device.
    #[getter]
    fn drive(&self) -> PathBuf {
        self.0.drive.clone()
    }

    /// The name of its volume.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// The number of the member.
    #[getter]
    fn member(&self) -> usize {
        self.0.member
    }

    /// Bytes of the file; of a device those that the volume takes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes
    }

    /// The process that uses it, if it can be seen.
    #[getter]
    fn holder(&self) -> Option<&str> {
        self.0.holder.as_deref()
    }

    /// How many members the volume has; None: the file has no header that is whole.
    #[getter]
    fn num_members(&self) -> Option<usize> {
        self.0.contents.as_ref().map(|contents| contents.num_members)
    }

    /// How many records the volume has; None: the file has no header that is whole.
    #[getter]
    fn num_records(&self) -> Option<u64> {
        self.0.contents.as_ref().map(|contents| contents.num_records)
    }
}

/// The files of volumes' members in a folder, by name; of a block device the member that it is, if
/// any. Takes no lock.
///
/// Raises:
///     OSError: where the drive cannot be read.
#[pyfunction]
#[pyo3(signature = (drive))]
pub(super) fn list_members(py: Python<'_>, drive: PathBuf) -> PyResult<Vec<PyMemberFile>> {
    run(py, || found::list(&drive)).map(|all| all.into_iter().map(PyMemberFile).collect())
}

/// Prepares a block device for volumes. Everything on it is lost.
///
/// Args:
///     device: its path.
///     overwrite: whether anything may be there.
///
/// Raises:
///     ValueError: for another file, a device that is too small, or one that has something.
///     OSError: where something uses it, or it cannot be written.
#[pyfunction]
#[pyo3(signature = (device, *, overwrite=false))]
pub(super) fn format_device(py: Python<'_>, device: PathBuf, overwrite: bool) -> PyResult<()> {
    run(py, || block_device::format(&device, overwrite))
}

/// Removes the files of a volume that no process uses, and makes its devices free.
///
/// Raises:
///     ValueError: for a name that a volume cannot have.
///     OSError: where a process uses it, or none of its files is there.
#[pyfunction]
#[pyo3(signature = (name, drives))]
pub(super) fn remove_volume(py: Python<'_>, name: String, drives: Vec<PathBuf>) -> PyResult<()> {
    run(py, || found::remove(&Location { name, drives }, SIGNAL_INTERVAL))
}

/// Reads every record of a volume that no process uses.
///
/// Returns:
///     the committed step, how many records there are, and what is wrong, one text each.
///
/// Raises:
///     ValueError: for a name that a volume cannot have.
///     OSError: where a process uses it, or a member is missing or damaged.
#[pyfunction]
#[pyo3(signature = (name, drives))]
pub(super) fn check_volume(
    py: Python<'_>,
    name: String,
    drives: Vec<PathBuf>,
) -> PyResult<(Option<u64>, usize, Vec<String>)> {
    let options = Options { keep: true, lock_timeout: SIGNAL_INTERVAL, ..Options::default() };
    let volume = run(py, || Volume::open(&Location { name, drives }, &options, Pool::global()?))?;
    let mut wrong = Vec::new();
    let records = volume.num_records();
    for begin in (0..records).step_by(RECORDS_BETWEEN_LOOKS) {
        let end = (begin + RECORDS_BETWEEN_LOOKS).min(records);
        let found = run(py, || volume.check(begin..end))?;
        wrong.extend(found.iter().map(ToString::to_string));
        py.check_signals()?;
    }
    Ok((volume.step(), records, wrong))
}

/// How many records are checked before signals are looked for.
const RECORDS_BETWEEN_LOOKS: usize = 256;
