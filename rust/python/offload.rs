//! The offload engine.
//!
//! Lists that come from Python are copied into Rust's for the time of a call: these are allocations
//! that grow with the number of tensors. The engine beneath makes none, but for a list of segments
//! in `expect_parts`.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use pyo3::{prelude::*, types::PyDict};

use super::{
    host::PyBuffer,
    logging::{answer, run},
    select::PySelectable,
    swap::PySwap,
    tensor::{PyTensorView, dtypes_named},
};
use crate::{
    device::{self, Piece, Stream},
    error::{Error, Result},
    host::pool::Pool,
    offload::{
        Deferral, Engine, Lent, OnDevice, Owners, Selection, Shape, Update, Weight, deferral_nbytes,
    },
    simd::isa::Isa,
    stream::{element::Dtype, view::View},
    tier::{Tier, ram::Ram, swap::Placed},
};

/// How long a wait keeps Python's signal handlers, such as Ctrl-C's, from running.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Steps Adam over host memory in the background, while gradients come down from a device and
/// weights go up to it.
///
/// Streams are the device's handles (`torch.cuda.current_stream().cuda_stream`); of "cpu" the
/// calling thread is the stream, and what a stream waits for blocks it. After a failure in the
/// background every call raises OSError.
///
/// Args:
///     device: where the weights are: "cuda:N", or "cpu", which copies in the background too.
///     numels: elements of each tensor, in forward order.
///     threads: how many of the process's workers may step, at most as many as there are; if None,
///         all but one, whose core launches work meanwhile; but one and an eighth where ranks share
///         the host. Of deferred steps four fifths of these, with a nice value of 10.
///     threads_share: if `threads` is None, which share of these there are, rounded up.
///     generations: how many optimizer steps' gradients there may be at once: 1, or 2 to take
///         those of a step while the one before is stepped, into other memory.
///     interval: for steps that are deferred, every how many of them a segment has its turn: 1 to
///         8. None: no step is. If given, generations is 2, and the arguments below are too.
///     dtypes: of each tensor's gradient and weight.
///     gradients: memory for gradients, of `deferral_nbytes`.
///     predicted: memory for weights that run ahead, of `deferral_nbytes`; None: none does.
///     row_lens: for channels that are stepped on the device, of each tensor the elements of a row;
///         0: it is no matrix. If given, the arguments below are too.
///     fraction: which share of the rows or columns of every segment is selected, 0 to 1.
///     selection: address of device memory of `selection_nbytes`, and what keeps it alive; the
///         engine holds that.
///     staging: host memory of `selection_nbytes`.
///     swap: what has the state of some tensors; None: all state is in the tensors themselves.
///     swapped: for each tensor, which of the swap's it is, or None.
///
/// Raises:
///     ValueError: for another device, or a bad number of threads or generations.
///     OSError: where there is no such device.
#[pyclass(name = "OffloadEngine", module = "stepwell._core", frozen)]
pub(super) struct PyOffloadEngine {
    /// It holds Python objects, which it never drops on a thread of its own: `drop_returned` does.
    engine: Engine,
    /// What keeps the device memory of selected channels alive. Dropped after the engine.
    _selection_owner: Option<Py<PyAny>>,
    /// What is pinned. Freed after the engine, the field above, which waits for all copies and
    /// unpins it.
    buffers: Mutex<Vec<Py<PyBuffer>>>,
    /// The engine uses it. Its places are taken as long as it lives.
    _swap: Option<Py<PySwap>>,
}

/// Bytes of host memory that an engine needs for steps that are deferred.
///
/// Args:
///     numels: elements of each tensor, in forward order.
///     dtypes: of each tensor's gradient and weight.
///     interval: every how many deferred steps a segment has its turn: 1 to 8.
///
/// Returns:
///     for gradients, and for weights that run ahead.
///
/// Raises:
///     ValueError: for an interval out of range.
#[pyfunction]
#[pyo3(name = "deferral_nbytes", signature = (numels, dtypes, interval))]
pub(super) fn py_deferral_nbytes(
    numels: Vec<usize>,
    dtypes: Vec<String>,
    interval: usize,
) -> Result<(usize, usize)> {
    deferral_nbytes(&numels, &dtypes_named(dtypes)?, interval)
}

/// Calls `wait` until it says that the end was reached; handlers of signals run in between, and
/// those of the log behind.
fn wait_interruptibly(
    py: Python<'_>,
    mut wait: impl FnMut() -> Result<bool> + Send,
) -> PyResult<()> {
    loop {
        match py.detach(&mut wait) {
            Ok(false) => py.check_signals()?,
            ended => return answer(py, ended.map(|_| ())),
        }
    }
}

/// The stream with this handle.
pub(super) fn stream_of(handle: u64) -> Stream {
    // SAFETY: the caller in Python vouches that it is a stream of the device, and alive.
    unsafe { Stream::new(handle) }
}

fn owners_of(owners: Vec<Py<PyAny>>) -> Owners {
    Box::new(owners)
}

fn check_lengths(names: &str, lengths: &[usize]) -> Result<()> {
    if lengths.iter().all(|&length| length == lengths[0]) {
        return Ok(());
    }
    Err(Error::value(format!("{names} have `{lengths:?}` entries, expected as many of each")))
}

impl PyOffloadEngine {
    /// Drops what the engine has held and does not use any more: here, where the interpreter is
    /// this thread's. Every method begins or ends with it.
    pub(super) fn drop_returned(&self, _attached: Python<'_>) {
        self.engine.returned().for_each(drop);
    }

    /// As `take`, or `take_deferred`, of gradients whose owners are `sources`.
    pub(super) fn take_all(
        &self,
        py: Python<'_>,
        gradients: &[(usize, u64, View)],
        sources: Vec<Py<PyAny>>,
        targets: Vec<Py<PyAny>>,
        stream: u64,
        is_deferred: bool,
    ) -> PyResult<()> {
        self.drop_returned(py);
        let mut lent = Some(Lent { sources: owners_of(sources), targets: owners_of(targets) });
        let of_engine: Vec<_> =
            gradients.iter().map(|&(index, source, _)| (index, source)).collect();
        // SAFETY: the caller vouches that the owners own the memory, and for its use and the
        // stream, as `take` has it.
        wait_interruptibly(py, || unsafe {
            if is_deferred {
                let stream = stream_of(stream);
                self.engine.take_deferred(&of_engine, &mut lent, stream, SIGNAL_INTERVAL)
            } else {
                self.engine.take(gradients, &mut lent, stream_of(stream), SIGNAL_INTERVAL)
            }
        })
    }

    /// Starts a step, as [`Engine::submit_with`], without letting go of the interpreter: nothing in
    /// it waits for another thread that needs it.
    ///
    /// # Safety
    /// As [`Engine::submit_with`].
    pub(super) unsafe fn submit_held(
        &self,
        predicted: Option<f32>,
        updates: &[Update],
        work: OnDevice<'_>,
        owners: Vec<Py<PyAny>>,
        stream: Stream,
    ) -> Result<()> {
        let mut owners = Some(owners_of(owners));
        // SAFETY: passed on from the caller.
        unsafe { self.engine.submit_with(predicted, updates, work, &mut owners, stream) }
    }

    /// As [`Engine::weight_checksums`].
    ///
    /// # Safety
    /// Likewise.
    pub(super) unsafe fn weight_checksums(
        &self,
        weights: &[Weight],
        sums: u64,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: passed on from the caller.
        unsafe { self.engine.weight_checksums(weights, sums, stream) }
    }

    /// What a step was to do with it has failed: every call raises from now on what
    /// this returns.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.engine.fail(error)
    }
}

impl Drop for PyOffloadEngine {
    /// Waits for the engine's threads without the GIL, and drops the Python objects that the engine
    /// holds after that, with the GIL.
    fn drop(&mut self) {
        // Without an interpreter nothing can be detached: the engine's own drop waits.
        let _ = Python::try_attach(|py| py.detach(|| self.engine.end()));
    }
}

#[pymethods]
impl PyOffloadEngine {
    #[new]
    #[pyo3(signature = (
        device, numels, *, threads=None, threads_share=1.0, generations=1, interval=None,
        dtypes=None, gradients=None, predicted=None, row_lens=None, fraction=0.0,
        selection=None, staging=None, swap=None, swapped=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn new(
        py: Python<'_>,
        device: &str,
        numels: Vec<usize>,
        threads: Option<usize>,
        threads_share: f64,
        generations: usize,
        interval: Option<usize>,
        dtypes: Option<Vec<String>>,
        gradients: Option<Py<PyBuffer>>,
        predicted: Option<Py<PyBuffer>>,
        row_lens: Option<Vec<usize>>,
        fraction: f64,
        selection: Option<(u64, Py<PyAny>)>,
        staging: Option<Py<PyBuffer>>,
        swap: Option<Py<PySwap>>,
        swapped: Option<Vec<Option<usize>>>,
    ) -> PyResult<Self> {
        let dtypes = dtypes_named(dtypes.unwrap_or_default())?;
        let whole = |buffer: &Py<PyBuffer>| {
            View::new(buffer.get().address(), Dtype::Uint8, buffer.get().nbytes())
        };
        let selected = match (&row_lens, &selection, &staging) {
            (Some(row_lens), Some((device, _)), Some(buffer)) => {
                Some(Selection { row_lens, fraction, device: *device, staging: whole(buffer)? })
            }
            (None, None, None) => None,
            _ => {
                return Err(Error::value(
                    "only some of row_lens, selection and staging are given, expected all or none",
                )
                .into());
            }
        };
        let deferral = match (interval, &gradients) {
            (Some(interval), Some(buffer)) => Some(Deferral {
                interval,
                dtypes: &dtypes,
                gradients: whole(buffer)?,
                predicted: predicted.as_ref().map(whole).transpose()?,
                selection: selected,
            }),
            (None, None) => None,
            _ => return Err(Error::value("only one of interval and gradients is given").into()),
        };
        let tier: Arc<dyn Tier> = match &swap {
            None => Arc::new(Ram),
            Some(swap) => {
                let swapped = swapped.unwrap_or_default();
                check_lengths("numels and swapped", &[numels.len(), swapped.len()])?;
                Arc::new(Placed::new(swap.get().swap()?, &swapped)?)
            }
        };
        let engine = run(py, || {
            let (pool, all) = match deferral {
                // In the background of a whole step workers meet the threads that launch it.
                Some(_) => {
                    let pool = Pool::background()?;
                    (pool, pool.threads_behind_launches())
                }
                None => {
                    let pool = Pool::global()?;
                    (pool, pool.threads_beside_launches())
                }
            };
            let share = || ((all as f64 * threads_share).ceil() as usize).clamp(1, all);
            let pool = pool.part(threads.unwrap_or_else(share))?;
            pool.claim_cpus();
            let shape = Shape { numels: &numels, generations, deferral };
            let device = device::open(device, Engine::events(shape))?;
            Engine::on(device, shape, tier, pool, Isa::detect()?)
        })?;
        let owner = selection.map(|(_, owner)| owner);
        let engine =
            Self { engine, _selection_owner: owner, buffers: Mutex::default(), _swap: swap };
        for buffer in gradients.into_iter().chain(predicted).chain(staging) {
            engine.pin(py, buffer, 0, None)?;
        }
        Ok(engine)
    }

    /// Pins bytes `begin` to `end` of `buffer` for the device, and keeps it alive as long as the
    /// engine. No copy may be of bytes that are pinned and of others.
    ///
    /// Args:
    ///     end: None: all from `begin` on.
    ///
    /// Raises:
    ///     ValueError: for bytes that the buffer does not have.
    ///     OSError: where the device refuses.
    #[pyo3(signature = (buffer, begin = 0, end = None))]
    fn pin(
        &self,
        py: Python<'_>,
        buffer: Py<PyBuffer>,
        begin: usize,
        end: Option<usize>,
    ) -> Result<()> {
        let (address, nbytes) = (buffer.get().address(), buffer.get().nbytes());
        let end = end.unwrap_or(nbytes);
        if begin > end || end > nbytes {
            return Err(Error::value(format!(
                "bytes `{begin}` to `{end}` of a buffer of `{nbytes}`, expected some that it has"
            )));
        }
        if begin < end {
            // SAFETY: the buffer is kept until the engine is dropped.
            py.detach(|| unsafe { self.engine.pin(address + begin, end - begin) })?;
        }
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        Ok(())
    }

    /// Copies whole gradients to host memory in the background, one after the other, after what
    /// `stream` holds now. The thread waits only where too many copies are on their way.
    ///
    /// Args:
    ///     indices: of the tensors, each once.
    ///     sources: addresses of their gradients on the device. They stay as they are until
    ///         `release`, `discard` or `synchronize`.
    ///     targets: host memory, not used until the step is done, or discarded.
    ///     source_owners: what keeps the sources alive; the engine holds it until then.
    ///     target_owners: what keeps the targets alive; the engine holds it until then.
    ///     stream: the stream that made the gradients.
    ///
    /// Raises:
    ///     ValueError: for a tensor or a size that is not the engine's, or while a step is running
    ///         that reads the only generation of gradients.
    ///     OSError: where the device has failed.
    #[pyo3(signature = (indices, sources, targets, *, source_owners, target_owners, stream=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn take(
        &self,
        py: Python<'_>,
        indices: Vec<usize>,
        sources: Vec<u64>,
        targets: Vec<PyRef<'_, PyTensorView>>,
        source_owners: Vec<Py<PyAny>>,
        target_owners: Vec<Py<PyAny>>,
        stream: u64,
    ) -> PyResult<()> {
        self.drop_returned(py);
        check_lengths(
            "indices, sources and targets",
            &[indices.len(), sources.len(), targets.len()],
        )?;
        let gradients: Vec<_> = indices
            .into_iter()
            .zip(sources)
            .zip(&targets)
            .map(|((index, source), target)| (index, source, target.0))
            .collect();
        let mut lent =
            Some(Lent { sources: owners_of(source_owners), targets: owners_of(target_owners) });
        // SAFETY: the caller vouches that the owners own the memory, and for its use and the
        // stream, as documented.
        wait_interruptibly(py, || unsafe {
            self.engine.take(&gradients, &mut lent, stream_of(stream), SIGNAL_INTERVAL)
        })
    }

    /// As `take`, to the engine's own memory for deferred gradients.
    ///
    /// Args:
    ///     indices: of the tensors, each once.
    ///     sources: addresses of their gradients on the device. They stay as they are until
    ///         `release`, `discard` or `synchronize`.
    ///     source_owners: what keeps the sources alive; the engine holds it until then.
    ///     stream: the stream that made the gradients.
    ///
    /// Raises:
    ///     ValueError: for a tensor that is not the engine's, or of an engine that defers nothing.
    ///     OSError: where the device has failed.
    #[pyo3(signature = (indices, sources, *, source_owners, stream=0))]
    fn take_deferred(
        &self,
        py: Python<'_>,
        indices: Vec<usize>,
        sources: Vec<u64>,
        source_owners: Vec<Py<PyAny>>,
        stream: u64,
    ) -> PyResult<()> {
        self.drop_returned(py);
        check_lengths("indices and sources", &[indices.len(), sources.len()])?;
        let gradients: Vec<_> = indices.into_iter().zip(sources).collect();
        let mut lent =
            Some(Lent { sources: owners_of(source_owners), targets: owners_of(Vec::new()) });
        // SAFETY: the caller vouches that the owners own the memory, and for its use and the
        // stream, as documented; the engine's own memory is pinned by it.
        wait_interruptibly(py, || unsafe {
            self.engine.take_deferred(&gradients, &mut lent, stream_of(stream), SIGNAL_INTERVAL)
        })
    }

    /// Copies any device memory to host memory in the background, after what `stream` holds now;
    /// the next step begins when all of it is there. The thread waits only where too many copies
    /// are on their way.
    ///
    /// Args:
    ///     sources: addresses on the device. It stays as it is until `release`, `discard` or
    ///         `synchronize`.
    ///     targets: host memory, which says how much.
    ///     source_owners: as of `take`.
    ///     target_owners: as of `take`.
    ///     stream: the stream that made it.
    ///
    /// Raises:
    ///     ValueError: while a step is running that reads the only generation of gradients, or for
    ///         too many copies at once.
    ///     OSError: where the device has failed.
    #[pyo3(signature = (sources, targets, *, source_owners, target_owners, stream=0))]
    fn take_part(
        &self,
        py: Python<'_>,
        sources: Vec<u64>,
        targets: Vec<PyRef<'_, PyTensorView>>,
        source_owners: Vec<Py<PyAny>>,
        target_owners: Vec<Py<PyAny>>,
        stream: u64,
    ) -> PyResult<()> {
        self.drop_returned(py);
        check_lengths("sources and targets", &[sources.len(), targets.len()])?;
        let parts: Vec<_> =
            sources.into_iter().zip(targets.iter().map(|target| target.0)).collect();
        let mut lent =
            Some(Lent { sources: owners_of(source_owners), targets: owners_of(target_owners) });
        // SAFETY: the caller vouches that the owners own the memory, and for its use and the
        // stream, as documented.
        wait_interruptibly(py, || unsafe {
            self.engine.take_part(&parts, &mut lent, stream_of(stream), SIGNAL_INTERVAL)
        })
    }

    /// Parts of gradients come to host memory by copies of the caller's, which `stream` holds all
    /// now. A segment is stepped when its parts are there, if it has any, and else when all is. The
    /// thread waits only where too many copies are on their way.
    ///
    /// Args:
    ///     indices: of the tensors.
    ///     begins: the first element of each part within its tensor.
    ///     ends: the end of each.
    ///     stream: the stream that copies them.
    ///
    /// Raises:
    ///     ValueError: for elements that the engine does not have, while a step is running that
    ///         reads the only generation of gradients, or for too many parts at once.
    ///     OSError: where the device has failed.
    #[pyo3(signature = (indices, begins, ends, *, stream=0))]
    fn expect_parts(
        &self,
        py: Python<'_>,
        indices: Vec<usize>,
        begins: Vec<usize>,
        ends: Vec<usize>,
        stream: u64,
    ) -> PyResult<()> {
        self.drop_returned(py);
        check_lengths("indices, begins and ends", &[indices.len(), begins.len(), ends.len()])?;
        let parts: Vec<_> = indices
            .into_iter()
            .zip(begins.into_iter().zip(ends).map(|(begin, end)| begin..end))
            .collect();
        // SAFETY: the caller vouches for the use of the host side and for the stream, as
        // documented.
        wait_interruptibly(py, || unsafe {
            self.engine.expect_parts(&parts, stream_of(stream), SIGNAL_INTERVAL)
        })
    }

    /// The segments of which channels may be selected.
    fn selectable(&self) -> Vec<PySelectable> {
        self.engine.selectable().map(PySelectable).collect()
    }

    /// The group of segments whose turn comes with the next deferred step. Waits for a step that
    /// runs.
    ///
    /// Raises:
    ///     OSError: where the step or the device has failed.
    fn next_group(&self, py: Python<'_>) -> PyResult<usize> {
        let mut group = 0;
        wait_interruptibly(py, || {
            let next = self.engine.next_group(SIGNAL_INTERVAL)?;
            group = next.unwrap_or(group);
            Ok(next.is_some())
        })?;
        Ok(group)
    }

    /// Starts a step of all that deferred steps have left pending, after what `stream` holds now,
    /// and returns: all weights land, none runs ahead. Gradients of the coming step are not
    /// touched.
    ///
    /// Returns:
    ///     whether there was anything.
    ///
    /// Raises:
    ///     ValueError: while a step is running.
    ///     OSError: where the device has failed.
    #[pyo3(signature = (*, stream=0))]
    fn settle(&self, py: Python<'_>, stream: u64) -> Result<bool> {
        self.drop_returned(py);
        py.detach(|| self.engine.settle(stream_of(stream)))
    }

    /// What is launched on `stream` from now on comes after the copies of gradients that were taken
    /// since the last `submit`: it may write them. The thread waits until the device has these
    /// copies.
    ///
    /// Raises:
    ///     OSError: where the device has failed.
    #[pyo3(signature = (*, stream=0))]
    fn order_after_copies(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let mut queued = None;
        wait_interruptibly(py, || {
            self.engine.order_after_copies(&mut queued, stream_of(stream), SIGNAL_INTERVAL)
        })
    }

    /// Forgets the gradients that were taken since the last `submit`: of a step that is skipped or
    /// refused. The thread waits until their copies have ended; then both sides may be written or
    /// freed. Nothing happens where none were taken.
    ///
    /// Raises:
    ///     OSError: where the device has failed.
    fn discard(&self, py: Python<'_>) -> PyResult<()> {
        // Once: what another thread takes while this one waits is not forgotten.
        let discarded = py.detach(|| self.engine.discard())?;
        let waited = discarded.map_or(Ok(()), |discarded| {
            wait_interruptibly(py, || self.engine.wait_discarded(discarded, SIGNAL_INTERVAL))
        });
        self.drop_returned(py);
        waited
    }

    /// `stream` waits for the gradients of the last `submit`: it may write them afterwards, and
    /// their memory may be freed to it. The thread waits until the device has all copies, that is
    /// for most of them.
    ///
    /// Raises:
    ///     OSError: where the device has failed.
    #[pyo3(signature = (*, stream=0))]
    fn release(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let released =
            wait_interruptibly(py, || self.engine.release(stream_of(stream), SIGNAL_INTERVAL));
        self.drop_returned(py);
        released
    }

    /// Writes checksums of memory of the device, in the order of `stream`.
    ///
    /// Args:
    ///     addresses: where each memory begins.
    ///     nbytes: its size.
    ///     sums: where `CHECKSUM_SUMS` int64 for each are written, one after the other.
    ///
    /// Raises:
    ///     ValueError: for other than as many sizes as addresses.
    ///     OSError: where the device has no kernel for it, or has failed.
    #[pyo3(signature = (addresses, nbytes, sums, *, stream=0))]
    fn checksums(
        &self,
        py: Python<'_>,
        addresses: Vec<u64>,
        nbytes: Vec<usize>,
        sums: u64,
        stream: u64,
    ) -> Result<()> {
        if addresses.len() != nbytes.len() {
            return Err(Error::value(format!(
                "`{}` addresses of `{}` sizes, expected as many",
                addresses.len(),
                nbytes.len()
            )));
        }
        let pieces = addresses.into_iter().zip(nbytes);
        let pieces: Vec<_> = pieces.map(|(address, nbytes)| Piece::new(address, nbytes)).collect();
        // SAFETY: Stepwell's Python holds the tensors of both until the stream has passed this.
        py.detach(|| unsafe { self.engine.checksums(&pieces, sums, stream_of(stream)) })
    }

    /// Keeps checksums of weights on the device: of what was uploaded last, and of what the device
    /// has stepped since.
    ///
    /// Args:
    ///     sums: where `CHECKSUM_SUMS` int64 for each segment are, one after the other, as long as
    ///         the engine lives.
    ///
    /// Raises:
    ///     OSError: where the device has no kernel for it.
    fn keep_checksums(&self, sums: u64) -> Result<()> {
        // SAFETY: Stepwell's Python holds the tensor as long as the engine.
        unsafe { self.engine.keep_checksums(sums) }
    }

    /// For each tensor the number of its first segment, and one more for the end.
    fn first_segments(&self) -> Vec<usize> {
        self.engine.first_segments().to_vec()
    }

    /// `stream` waits for the uploads of the elements `begin` to `end` of a tensor; the thread only
    /// until they are enqueued.
    ///
    /// Raises:
    ///     ValueError: for elements that the engine does not have.
    ///     OSError: where the step or the device has failed.
    #[pyo3(signature = (index, begin, end, *, stream=0))]
    fn wait(
        &self,
        py: Python<'_>,
        index: usize,
        begin: usize,
        end: usize,
        stream: u64,
    ) -> PyResult<()> {
        wait_interruptibly(py, || {
            self.engine.wait(index, &(begin..end), stream_of(stream), SIGNAL_INTERVAL)
        })
    }

    /// The thread waits until the step is done on the host, and `stream` for all uploads.
    ///
    /// Raises:
    ///     OSError: where the step or the device has failed.
    #[pyo3(signature = (*, stream=0))]
    fn finish(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let finished =
            wait_interruptibly(py, || self.engine.finish(stream_of(stream), SIGNAL_INTERVAL));
        self.drop_returned(py);
        finished
    }

    /// As `finish`, and the thread waits for every copy.
    ///
    /// Raises:
    ///     OSError: where the step or the device has failed.
    #[pyo3(signature = (*, stream=0))]
    fn synchronize(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        self.finish(py, stream)?;
        let drained = wait_interruptibly(py, || self.engine.drain(SIGNAL_INTERVAL));
        self.drop_returned(py);
        drained
    }

    /// Ends it: waits for the step that runs and for all copies, and unpins. Nothing is taken or
    /// submitted from now on.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.engine.end());
        self.drop_returned(py);
    }

    /// Steps that are submitted from now on begin when something waits for them, or with
    /// `let_begin`: what does not wait then finds the old weights, every time. For tests.
    fn hold(&self) {
        self.engine.hold();
    }

    /// Has the step that was submitted begin.
    fn let_begin(&self) {
        self.engine.let_begin();
    }

    /// Whether a step that was submitted waits for `let_begin`.
    #[getter]
    fn is_held(&self) -> bool {
        self.engine.is_held()
    }

    /// Bytes of host memory that are pinned for copies.
    #[getter]
    fn pinned_nbytes(&self) -> usize {
        self.engine.pinned_nbytes()
    }

    /// Whether a step is running on the host.
    #[getter]
    fn busy(&self) -> bool {
        self.engine.is_busy()
    }

    /// Workers that step.
    #[getter]
    fn threads(&self) -> usize {
        self.engine.threads()
    }

    /// Of the last step: seconds of `step` (first chunk to last) and, within it, `gradients`
    /// (waiting for them); `bytes_downloaded`, `bytes_uploaded`; `oldest_age`: how many steps
    /// before it the oldest gradient came that no turn has applied.
    #[pyo3(signature = () -> "dict[str, float]")]
    fn timing<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let timing = self.engine.timing();
        let dict = PyDict::new(py);
        dict.set_item("step", timing.step.as_secs_f64())?;
        dict.set_item("gradients", timing.gradients.as_secs_f64())?;
        dict.set_item("bytes_downloaded", timing.bytes_downloaded)?;
        dict.set_item("bytes_uploaded", timing.bytes_uploaded)?;
        dict.set_item("oldest_age", timing.oldest_age)?;
        Ok(dict)
    }
}
