//! The parameters of an optimizer with their states, as the core steps them: what Python binds once
//! is looked at in each step, and stepped by one call.
//!
//! A step is two calls. [`PyStore::look`] finds the gradients, and what has moved since the last
//! step: that alone is bound anew by Python. What the program decides between (clip, skip, refuse)
//! is a number or two. [`PyStore::step`], or beside a device [`PyStore::submit`], does the rest:
//!
//! | what | where |
//! |---|---|
//! | spans, and how they are seen to be as they were | `span.rs` |
//! | what is read of a torch tensor | `torch.rs` |
//! | gradients of the step that comes | `look.rs` |
//! | weights that a program may have written | `contents.rs` |
//! | a step in host memory | `step.rs` |
//! | a step beside a device | `submit.rs` |
//! | what the device steps with it | `residents.rs` |
//! | no Python within a call | `atomic.rs` |
//!
//! - STORE-1 A call looks at everything before it changes anything, and no instruction of Python
//!   runs in it. So a signal's handler or another thread sees the optimizer before a step or after
//!   it. (The arithmetic of a step in host memory runs without the interpreter's lock, as torch's
//!   operators do.)
//! - STORE-2 Objects that a call replaces are let go of when it is over: their finalizers are
//!   Python.
//! - STORE-3 What moved between the look and the step is an error, before any change.
//!
//! Cost: a microsecond per parameter and step.

mod atomic;
mod contents;
mod look;
mod residents;
mod span;
mod step;
mod submit;
mod torch;

use std::collections::{HashMap, HashSet};

use pyo3::{
    gc::{PyTraverseError, PyVisit},
    prelude::*,
    types::PyString,
};

pub(super) use self::look::PyLook;
use self::{
    look::Looked,
    span::Span,
    submit::{Beside, Deferred, Protection},
    torch::Torch,
};
use super::{
    adam::{PyAdamTensor, PyGradStats, PyHyper},
    device_steps::PyDeviceSteps,
    offload::PyOffloadEngine,
};
use crate::error::{Error, Result};

/// Spans of a step, and where what it writes begins, with its bytes, ascending.
type Memory = (Vec<usize>, Vec<(usize, usize)>);

/// Parameters with their states, which are stepped together.
///
/// Args:
///     is_beside: whether they are beside a device; else they are in host memory, and stepped
///         there.
///     engine: has the host sides of those that were added; None: the device has all state.
#[pyclass(name = "Store", module = "stepwell._core")]
pub(super) struct PyStore {
    torch: Torch,
    spans: Vec<Span>,
    /// By the address of the parameter's object, which its span holds.
    by_param: HashMap<usize, usize>,
    /// Of each group the seed of its stochastic rounding, which what is bound depends on.
    seeds: Option<Py<PyAny>>,
    /// The gradients of the step that comes, in the order of the groups.
    looked: Vec<Looked>,
    /// The spans of a step in host memory, and the memory that it writes, ascending; None: it is to
    /// be found anew.
    written: Option<Memory>,
    beside: Option<Beside>,
    /// Steps the spans whose state is on the device; None: there is none.
    device_steps: Option<Py<PyDeviceSteps>>,
    /// Whether this rank has not taken a step on which all ranks have decided: set by the caller,
    /// cleared by the step itself.
    #[pyo3(get, set)]
    has_left: bool,
}

impl PyStore {
    fn position(&self, position: usize) -> Result<&Looked> {
        let count = self.looked.len();
        self.looked.get(position).ok_or_else(|| {
            Error::value(format!(
                "position is `{position}`, expected one of the last look's {count}"
            ))
        })
    }
}

#[pymethods]
impl PyStore {
    #[new]
    #[pyo3(signature = (*, is_beside = false, engine = None))]
    fn new(py: Python<'_>, is_beside: bool, engine: Option<Py<PyOffloadEngine>>) -> PyResult<Self> {
        Ok(Self {
            torch: Torch::import(py)?,
            spans: Vec::new(),
            by_param: HashMap::new(),
            seeds: None,
            looked: Vec::new(),
            written: None,
            beside: is_beside.then(|| Beside::new(engine)),
            device_steps: None,
            has_left: false,
        })
    }

    /// Adds parameters that are stepped beside a device, in the order of the engine's tensors.
    /// (Those in host memory are added where `look` finds them.)
    fn add(&mut self, params: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        for param in &params {
            self.insert(param, false);
        }
        if let (Some(beside), Some(param)) = (&mut self.beside, params.first()) {
            beside.is_on_cpu = param.getattr("is_cpu")?.is_truthy()?;
        }
        Ok(())
    }

    /// Has the parameters whose state is on the device be these, after all of `add`. Where they
    /// are others than before, the last look is forgotten.
    ///
    /// Args:
    ///     params: the parameters.
    ///     steps: steps them.
    fn set_residents(
        &mut self,
        py: Python<'_>,
        params: Vec<Bound<'_, PyAny>>,
        steps: Option<Py<PyDeviceSteps>>,
    ) -> PyResult<()> {
        self.set_residents_to(py, &params, steps)
    }

    /// Looks at all parameters and states anew in the next step, as if it were the first.
    fn unbind(&mut self, py: Python<'_>) {
        let bound: Vec<_> = self.spans.iter_mut().map(|span| span.binding.take()).collect();
        self.written = None;
        py_drop(py, bound);
    }

    /// Forgets the last look, of a step that is not taken: its gradients may be freed.
    fn discard(&mut self, py: Python<'_>) {
        let looked = std::mem::take(&mut self.looked);
        py_drop(py, looked);
    }

    /// The parameters.
    #[getter]
    fn params(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.spans.iter().map(|span| span.param.clone_ref(py)).collect()
    }

    /// Finds the gradients of the step that comes.
    ///
    /// Args:
    ///     groups: the parameters of each group.
    ///     states: those of the optimizer, by parameter; None: no program has them, so none has
    ///         changed.
    ///     seeds: of each group, of its stochastic rounding. Where they have changed all is bound
    ///         anew.
    ///     grads: of each parameter of all groups its gradient; None in it: there is none. None:
    ///         they are what the parameters have as `grad`.
    ///
    /// Raises:
    ///     ValueError: other than as many gradients as parameters are given.
    ///     Whatever torch raises of a tensor.
    #[pyo3(signature = (groups, states, seeds, *, grads = None))]
    fn look(
        &mut self,
        py: Python<'_>,
        groups: Vec<Vec<Bound<'_, PyAny>>>,
        states: Option<Bound<'_, PyAny>>,
        seeds: Bound<'_, PyAny>,
        grads: Option<Vec<Bound<'_, PyAny>>>,
    ) -> PyResult<PyLook> {
        let count: usize = groups.iter().map(Vec::len).sum();
        if let Some(grads) = &grads
            && grads.len() != count
        {
            let message = format!("`{}` gradients of `{count}` parameters", grads.len());
            return Err(Error::value(format!("{message}, expected one of each")).into());
        }
        let are_same = match &self.seeds {
            Some(before) => seeds.eq(before)?,
            None => false,
        };
        if !are_same {
            self.unbind(py);
            self.seeds = Some(seeds.unbind());
        }
        self.look_at(py, groups, states, grads.as_deref())
    }

    /// Binds what is at `position` of the last look.
    ///
    /// Args:
    ///     position: in its lists.
    ///     tensor: what the core steps, with the gradient's memory in the host; None: this rank
    ///         has nothing of the parameter.
    ///     grad: the gradient that is stepped, dense.
    ///     state: the optimizer's state of it.
    ///     parts: of the state what the step works with: its name, what the state has, and what
    ///         this rank has of that.
    ///     piece: what is stepped of the parameter; None: the parameter itself.
    ///     target: where on the device the new weight goes, in memory that the caller keeps alive;
    ///         0: it stays in host memory, where the step writes it. None: to the parameter.
    ///     is_kept: whether the next step may go on with it.
    ///     write_backs: what is called without arguments behind the step, functions of C.
    ///
    /// Raises:
    ///     ValueError: the gradient is another than the tensor's, or lies elsewhere.
    #[pyo3(signature = (
        position, tensor, grad, *, state, parts, piece = None, target = None, is_kept = true,
        write_backs = vec![]
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn bind(
        &mut self,
        py: Python<'_>,
        position: usize,
        tensor: Option<PyRef<'_, PyAdamTensor>>,
        grad: Bound<'_, PyAny>,
        state: Bound<'_, PyAny>,
        parts: Vec<(Bound<'_, PyString>, Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        piece: Option<Bound<'_, PyAny>>,
        target: Option<u64>,
        is_kept: bool,
        write_backs: Vec<Py<PyAny>>,
    ) -> PyResult<()> {
        self.bind_at(py, position, tensor, grad, state, parts, piece, target, is_kept, write_backs)
    }

    /// Binds what is at `position` of the last look, whose state is on the device.
    ///
    /// Args:
    ///     position: in its lists.
    ///     grad: the gradient that is stepped, dense, at a multiple of its elements' size.
    ///     memory: the state, `DeviceSteps.state_nbytes` on the device. The caller holds it while
    ///         the optimizer's state is `state`.
    ///     state: what the optimizer has in its place.
    ///     piece: what is stepped of the parameter; None: the parameter itself.
    ///     is_kept: whether the next step may go on with it.
    ///
    /// Raises:
    ///     ValueError: the gradient or the memory is not that of the parameter.
    #[pyo3(signature = (position, grad, *, memory, state, piece = None, is_kept = true))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn bind_on_device(
        &mut self,
        py: Python<'_>,
        position: usize,
        grad: Bound<'_, PyAny>,
        memory: Bound<'_, PyAny>,
        state: Bound<'_, PyAny>,
        piece: Option<Bound<'_, PyAny>>,
        is_kept: bool,
    ) -> PyResult<()> {
        self.bind_resident(py, position, grad, &memory, state, piece, is_kept)
    }

    /// The positions, in the last look's lists, of gradients that lie in memory which the step
    /// writes.
    fn overlapping(&mut self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.find_overlapping(py)
    }

    /// The number of the update that comes of each parameter of the last look, from 1; 0: it is not
    /// bound.
    fn numbers(&self) -> Vec<u64> {
        self.numbers_of_updates()
    }

    /// Copies gradients of the last look to host memory, in the background, after what `stream`
    /// holds now.
    ///
    /// Args:
    ///     positions: in the look's lists.
    ///     buffers: what has the memory of all host sides.
    ///     stream: the stream that made them.
    ///     order: of each parameter its place in the step; None: as they were added.
    ///
    /// Raises:
    ///     ValueError: as `OffloadEngine.take`.
    ///     OSError: where the device has failed.
    #[pyo3(signature = (positions, *, buffers, stream, is_deferred, order = None))]
    fn take(
        slf: Bound<'_, Self>,
        positions: Vec<usize>,
        buffers: Vec<Py<PyAny>>,
        stream: u64,
        is_deferred: bool,
        order: Option<Vec<usize>>,
    ) -> PyResult<()> {
        Self::take_at(slf, positions, buffers, stream, is_deferred, order)
    }

    /// Writes the checksums of the weights on the device that come with the step of the last look,
    /// as `OffloadEngine.keep_checksums` has them, in the order of `stream`. Those of others are
    /// left as they are.
    ///
    /// Args:
    ///     sums: where `CHECKSUM_SUMS` int64 for each segment are, one after the other.
    ///     stream: the stream that has waited for these weights.
    ///
    /// Returns:
    ///     the spans of which none was taken: these are not what they were, of another size, dtype
    ///     or device.
    ///
    /// Raises:
    ///     OSError: where the device has failed.
    #[pyo3(signature = (sums, *, stream))]
    fn take_checksums(slf: Bound<'_, Self>, sums: u64, stream: u64) -> PyResult<Vec<usize>> {
        Self::take_checksums_at(slf, sums, stream)
    }

    /// Starts the step of what the last look has found, in the background: all of it, or nothing.
    /// Gradients on the device may be written after `release`.
    ///
    /// Args:
    ///     hypers: of each group, as it was given to `look`.
    ///     buffers: what has the memory of all host sides.
    ///     stream: the stream that uses the weights.
    ///     record: what is the store's `record` from the moment on in which the step has begun.
    ///     order: of each parameter its place in the step; None: as they were added.
    ///     verified: the spans of which fingerprints are verified, and taken.
    ///     deferred: how updates are deferred: `predicted_updates`, `steps_pending`, `at_once`, and
    ///         the `num_settled` of then. None: none is, and all that is pending is applied.
    ///     selected: as `OffloadEngine.submit`; None: no channel is selected.
    ///     protection: what has uses of tensors wait that the step writes: dicts, each with a dict
    ///         that is put into it, and classes, each with the tensors that get it.
    ///     begun: what is called without arguments when the step has begun, functions of C.
    ///
    /// Returns:
    ///     whether updates are deferred: not where all that was pending has been applied since.
    ///
    /// Raises:
    ///     ValueError: with nothing changed: a parameter or a gradient was given other memory since
    ///         the look; what `OffloadEngine.submit` refuses.
    ///     OSError: where the device has failed.
    #[pyo3(signature = (
        hypers, *, buffers, stream, record, order = None, verified = None, deferred = None,
        selected = None, protection = (vec![], vec![]), begun = vec![]
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn submit(
        slf: Bound<'_, Self>,
        hypers: Vec<PyRef<'_, PyHyper>>,
        buffers: Vec<Py<PyAny>>,
        stream: u64,
        record: Py<PyAny>,
        order: Option<Vec<usize>>,
        verified: Option<HashSet<usize>>,
        deferred: Option<Deferred>,
        selected: Option<Vec<(usize, bool, Vec<u32>)>>,
        protection: Protection<'_>,
        begun: Vec<Py<PyAny>>,
    ) -> PyResult<bool> {
        Self::submit_all(
            slf, hypers, buffers, stream, record, order, verified, deferred, selected, protection,
            begun,
        )
    }

    /// What the caller has said of the last step that has begun; None: none has.
    #[getter]
    fn record(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.last_record(py)
    }

    /// How often all that was pending has been applied.
    #[getter]
    fn num_settled(&self) -> u64 {
        self.settled_times()
    }

    /// The parameters of which the device may lack an update, or have a predicted weight.
    #[getter]
    fn pending(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.pending_params(py)
    }

    /// The parameters whose weights come from the host with the step of the last look: its own, and
    /// those that are pending.
    #[getter(landing)]
    fn py_landing(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.landing_params(py)
    }

    /// The parameters whose storage the store keeps alive between deferred steps, by one reference
    /// each.
    #[getter]
    fn held(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.held_params(py)
    }

    /// Finite check and largest magnitude of the gradients of the last look, which are in host
    /// memory; the GIL is released.
    fn stats(slf: Bound<'_, Self>) -> PyResult<PyGradStats> {
        Self::stats_of(slf)
    }

    /// Steps what the last look has found, all of it or nothing; the arithmetic runs without the
    /// GIL.
    ///
    /// Args:
    ///     hypers: of each group, as it was given to `look`.
    ///
    /// Raises:
    ///     ValueError: with nothing changed: a gradient or a parameter was given other memory since
    ///         the look, or memory overlaps.
    fn step(slf: Bound<'_, Self>, hypers: Vec<PyRef<'_, PyHyper>>) -> PyResult<()> {
        Self::step_all(slf, hypers)
    }

    /// Nothing is pending any more, and the engine writes no weight.
    fn note_settled(&mut self, py: Python<'_>) {
        self.forget_pending(py)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        self.spans.iter().try_for_each(|span| span.traverse(&visit))?;
        self.looked.iter().try_for_each(|looked| looked.traverse(&visit))?;
        self.beside.iter().try_for_each(|beside| beside.traverse(&visit))
    }

    fn __clear__(&mut self) {
        self.spans.clear();
        self.by_param.clear();
        self.looked.clear();
        self.beside = None;
    }
}

impl PyStore {
    fn insert(&mut self, param: &Bound<'_, PyAny>, is_resident: bool) -> usize {
        *self.by_param.entry(param.as_ptr() as usize).or_insert_with(|| {
            self.spans.push(Span { param: param.clone().unbind(), is_resident, binding: None });
            self.spans.len() - 1
        })
    }
}

/// Lets go of Python objects, where the interpreter is this thread's.
fn py_drop<T>(_attached: Python<'_>, objects: T) {
    drop(objects);
}
