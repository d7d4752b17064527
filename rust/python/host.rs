//! Pool, memory, and what this machine is.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};

use super::logging::{self, answer, run};
use crate::{
    adam::ceiling::{self, Streams},
    error::{Error, Result},
    host::{
        claims::{self, Announcement, Room},
        environment, gpus, io_uring,
        memory::{self, AddressSpace, Buffer, BufferConfig},
        pool::{self, Pool, PoolConfig},
        topology::{CoreKind, Topology},
    },
    simd::isa::Isa,
    state::chunk,
};

/// Persistent workers, each pinned to a core: performance cores before efficiency cores, within the
/// allowed set.
///
/// Args:
///     threads: number of workers; all allowed physical cores if None.
///     cpus: the CPU of each worker.
///
/// Raises:
///     ValueError: for a count or list that cannot be.
#[pyclass(name = "Pool", module = "stepwell._core", frozen)]
pub(super) struct PyPool(Handle);

/// A pool of one's own, or the process's.
#[derive(Clone)]
pub(super) enum Handle {
    Own(Arc<Pool>),
    Global,
}

impl Handle {
    pub(super) fn get(&self) -> Result<&Pool> {
        match self {
            Self::Own(pool) => Ok(pool),
            Self::Global => Pool::global(),
        }
    }
}

impl PyPool {
    /// The given pool, or the process's, made on first use.
    pub(super) fn pool(given: Option<&Self>) -> Handle {
        given.map_or(Handle::Global, |pool| pool.0.clone())
    }
}

#[pymethods]
impl PyPool {
    #[new]
    #[pyo3(signature = (*, threads=None, cpus=None))]
    fn new(py: Python<'_>, threads: Option<usize>, cpus: Option<Vec<usize>>) -> PyResult<Self> {
        let pool = run(py, || Pool::new(&PoolConfig { threads, cpus }))?;
        Ok(Self(Handle::Own(Arc::new(pool))))
    }

    /// The process's pool, made on first use: `STEPWELL_THREADS`, the affinity mask, and this
    /// rank's share of the host.
    #[staticmethod]
    #[pyo3(name = "default")]
    fn process_default(py: Python<'_>) -> PyResult<Self> {
        run(py, Pool::global)?;
        Ok(Self(Handle::Global))
    }

    /// Number of workers.
    #[getter]
    fn threads(&self) -> Result<usize> {
        Ok(self.0.get()?.threads())
    }

    /// The CPU of each worker.
    #[getter]
    fn cpus(&self) -> Result<Vec<usize>> {
        Ok(self.0.get()?.cpus().to_vec())
    }
}

/// Page-aligned host memory of exactly `nbytes` (rounded up to a page), zeroed, on huge pages where
/// the kernel gives them, faulted in by all workers at once.
///
/// Args:
///     nbytes: how much.
///     pool: whose workers touch it first; the default pool if None.
///     lock: keep it resident.
///
/// Raises:
///     OSError: where there is no memory, or `lock` is above RLIMIT_MEMLOCK.
#[pyclass(name = "Buffer", module = "stepwell._core", frozen)]
pub(super) struct PyBuffer(Buffer);

#[pymethods]
impl PyBuffer {
    #[new]
    #[pyo3(signature = (nbytes, *, pool=None, lock=false))]
    fn new(py: Python<'_>, nbytes: usize, pool: Option<&PyPool>, lock: bool) -> PyResult<Self> {
        let pool = PyPool::pool(pool);
        run(py, || Buffer::new(nbytes, &BufferConfig { lock }, pool.get()?)).map(Self)
    }

    /// Address of the first byte.
    #[getter]
    pub(super) fn address(&self) -> usize {
        self.0.as_ptr().expose_provenance()
    }

    /// Bytes asked for.
    #[getter]
    pub(super) fn nbytes(&self) -> usize {
        self.0.nbytes()
    }
}

/// Addresses that nothing is at, and that nothing else gets: for tensors that name state which is
/// not in host memory. An access to them ends the process.
///
/// Args:
///     nbytes: how many.
///
/// Raises:
///     OSError: where there are not so many.
#[pyclass(name = "AddressSpace", module = "stepwell._core", frozen)]
pub(super) struct PyAddressSpace(AddressSpace);

#[pymethods]
impl PyAddressSpace {
    #[new]
    fn new(nbytes: usize) -> Result<Self> {
        AddressSpace::new(nbytes).map(Self)
    }

    /// The first of them.
    #[getter]
    fn address(&self) -> usize {
        self.0.address()
    }

    /// How many were asked for.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.nbytes()
    }
}

/// Seconds of one pass over `numel` elements of streams with these bytes per element, on the pool,
/// with next to no arithmetic: the ceiling of a kernel that reads and writes as much.
///
/// Args:
///     numel: elements.
///     read_write_bytes: streams that are read and written in place.
///     read_bytes: streams that are only read.
///     write_bytes: streams that are only written.
///     passes: the median of how many.
///     pool: the default pool if None.
///
/// Raises:
///     ValueError: for no elements or no streams.
///     OSError: where there is no memory for them.
#[pyfunction]
#[pyo3(signature = (*, numel, read_write_bytes, read_bytes, write_bytes, passes=5, pool=None))]
pub(super) fn stream_ceiling(
    py: Python<'_>,
    numel: usize,
    read_write_bytes: Vec<usize>,
    read_bytes: Vec<usize>,
    write_bytes: Vec<usize>,
    passes: usize,
    pool: Option<&PyPool>,
) -> PyResult<f64> {
    let streams = Streams { read_write: read_write_bytes, read: read_bytes, write: write_bytes };
    let pool = PyPool::pool(pool);
    run(py, || ceiling::measure(pool.get()?, Isa::detect()?, numel, &streams, 1, passes))
        .map(|time| time.as_secs_f64())
}

/// Bytes of host memory that this process can still take: what the kernel estimates, and what its
/// control groups leave; less what processes have claimed of that. None where the system does not
/// say.
#[pyfunction]
pub(super) fn free_memory_bytes(py: Python<'_>) -> PyResult<Option<u64>> {
    run(py, || Ok::<_, Error>(claims::room().bytes()))
}

/// Host memory that buffers will take: other processes of this host count it as used until then.
///
/// A context manager. The claim ends behind the block, with `end`, or with the object.
///
/// Args:
///     nbytes: how much.
///     held_nbytes: how much of that is taken already, by what is given back meanwhile.
///     is_checked: whether the claim is refused where there is less.
#[pyclass(name = "MemoryClaim", module = "stepwell._core", frozen)]
pub(super) struct PyMemoryClaim {
    announcement: Mutex<Option<Announcement>>,
    is_refused: bool,
    room: Room,
}

#[pymethods]
impl PyMemoryClaim {
    #[new]
    #[pyo3(signature = (nbytes, *, held_nbytes=0, is_checked=true))]
    fn new(py: Python<'_>, nbytes: u64, held_nbytes: u64, is_checked: bool) -> PyResult<Self> {
        let announce = || Ok::<_, Error>(claims::announce(nbytes, held_nbytes, is_checked));
        let (announcement, room) = run(py, announce)?;
        let is_refused = announcement.is_none();
        Ok(Self { announcement: Mutex::new(announcement), is_refused, room })
    }

    /// Whether nothing was claimed, since there is less.
    #[getter]
    fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// What there was, beside all claims, in bytes; None where the system does not say.
    #[getter]
    fn room_nbytes(&self) -> Option<u64> {
        self.room.bytes()
    }

    /// What other processes had claimed and not taken, in bytes.
    #[getter]
    fn others_nbytes(&self) -> u64 {
        self.room.others_bytes
    }

    /// Those processes, by number.
    #[getter]
    fn others(&self) -> Vec<u32> {
        self.room.others.clone()
    }

    /// What no buffer has taken is free again.
    fn end(&self, py: Python<'_>) {
        let announcement = self.announcement.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(announcement));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_args: "object"))]
    fn __exit__(&self, py: Python<'_>, _args: &Bound<'_, PyTuple>) {
        self.end(py);
    }
}

/// What would fall to each of `num_ranks` ranks of this host, with the CPUs that this process may
/// use.
///
/// Returns:
///     for each rank the CPUs of its workers, and the PCI address of its GPU, if that is known.
///
/// Raises:
///     ValueError: for no ranks.
#[pyfunction]
pub(super) fn places_of_ranks(
    py: Python<'_>,
    num_ranks: usize,
) -> PyResult<Vec<(Vec<usize>, Option<String>)>> {
    let places = run(py, || pool::places_of_ranks(num_ranks))?;
    Ok(places.into_iter().map(|place| (place.cpus, place.gpu)).collect())
}

/// Chunks of a parameter of `numel` elements.
#[pyfunction]
pub(super) fn num_chunks(numel: usize) -> usize {
    chunk::num_chunks(numel)
}

/// What this machine is, as `stepwell doctor` shows it: a dict of plain values.
///
/// A setting that is refused ends nothing here: `isa` or `pool_cpus` is None then, and `isa_error`
/// or `pool_error` holds the message.
#[pyfunction]
#[pyo3(signature = () -> "dict[str, object]")]
pub(super) fn system_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let topology = Topology::host();
    let info = PyDict::new(py);
    let isa = Isa::detect();
    info.set_item("isa", isa.as_ref().ok().map(|isa| isa.name()))?;
    info.set_item("isa_error", isa.err().map(|error| error.to_string()))?;
    info.set_item("isas_available", Isa::available().map(Isa::name).collect::<Vec<_>>())?;
    let cpus: PyResult<Vec<_>> = topology
        .cpus()
        .map(|cpu| {
            let entry = PyDict::new(py);
            entry.set_item("id", cpu.id)?;
            entry.set_item("core", cpu.core)?;
            entry.set_item("node", cpu.node)?;
            entry.set_item(
                "kind",
                if cpu.kind == CoreKind::Performance { "performance" } else { "efficiency" },
            )?;
            Ok(entry)
        })
        .collect();
    info.set_item("cpus", cpus?)?;
    let pool = Pool::global();
    info.set_item("pool_cpus", pool.as_ref().ok().map(|pool| pool.cpus()))?;
    info.set_item("pool_error", pool.err().map(|error| error.to_string()))?;
    let share = environment::rank_share().ok().flatten();
    info.set_item("ranks_on_host", share.map_or(1, |share| share.num_ranks))?;
    info.set_item("numa_nodes", topology.nodes())?;
    let gpus = gpus::addresses(Path::new("/")).into_iter().map(|gpu| {
        let node = topology.node_of_gpu(&gpu);
        (gpu, node)
    });
    info.set_item("gpus", gpus.collect::<Vec<_>>())?;
    info.set_item("huge_page_policy", memory::huge_page_policy())?;
    let room = py.detach(claims::room);
    info.set_item("free_memory_bytes", room.free_bytes)?;
    info.set_item("claimed_memory_bytes", room.others_bytes)?;
    info.set_item("claimants", room.others)?;
    let cpus = Pool::global().map_or(vec![], |pool| pool.cpus().to_vec());
    info.set_item("others_on_cpus", py.detach(|| claims::others_on(&cpus)))?;
    info.set_item("memlock_limit_bytes", memory::memlock_limit_bytes())?;
    info.set_item(
        "io_uring",
        io_uring::probe().map_or_else(|error| error.to_string(), |()| "available".to_owned()),
    )?;
    answer(py, Ok::<_, PyErr>(info))
}

/// Has the core's log records come to Python's `logging`, under "stepwell", and remembers this
/// process's affinity mask. Called once, by the package, before it imports torch.
#[pyfunction]
pub(super) fn connect(py: Python<'_>) -> PyResult<()> {
    pool::remember_affinity();
    logging::connect(py)
}

/// How this module was built: a dict of plain values, for bug reports.
#[pyfunction]
#[pyo3(signature = () -> "dict[str, object]")]
pub(super) fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    info.set_item("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS))?;
    Ok(info)
}
