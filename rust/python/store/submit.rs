//! A step of parameters beside a device: what they become of is decided, and all of it happens in
//! one call.

use std::{collections::HashSet, io};

use pyo3::{
    gc::{PyTraverseError, PyVisit},
    intern,
    prelude::*,
    types::{PyList, PyType},
};

use super::{
    PyStore,
    atomic::Atomic,
    look::Looked,
    py_drop,
    span::Binding,
    torch::{address, storage},
};
use crate::{
    error::{Error, Result},
    offload::{Change, OnDevice, Update},
    python::{
        adam::PyHyper,
        offload::{PyOffloadEngine, stream_of},
    },
};

/// What a store has beside a device.
pub(super) struct Beside {
    engine: Option<Py<PyOffloadEngine>>,
    pub(super) is_on_cpu: bool,
    /// Of each span for how many deferred steps more the device may lack an update, or have a
    /// predicted weight, if no gradient comes.
    pending: Vec<u32>,
    /// Of each span the storage of its weight between deferred steps. Here, and not with each job:
    /// what refers to the memory of a weight is counted.
    held: Vec<Option<Py<PyAny>>>,
    /// What the caller has said of the last step.
    record: Option<Py<PyAny>>,
    /// How often all that was pending has been applied.
    num_settled: u64,
}

impl Beside {
    pub(super) fn new(engine: Option<Py<PyOffloadEngine>>) -> Self {
        Self {
            engine,
            is_on_cpu: false,
            pending: vec![],
            held: vec![],
            record: None,
            num_settled: 0,
        }
    }

    /// Shows the collector of garbage what it holds.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        self.held.iter().try_for_each(|storage| visit.call(storage))?;
        visit.call(&self.record)
    }

    fn resize(&mut self, spans: usize) {
        self.pending.resize(spans, 0);
        self.held.resize_with(spans, || None);
    }
}

/// How updates of a step are deferred.
#[derive(FromPyObject)]
pub(super) struct Deferred {
    /// By how many updates weights that land run ahead along the momentum.
    #[pyo3(item)]
    predicted_updates: f32,
    /// For how many deferred steps an update may be pending, or its weight predicted.
    #[pyo3(item)]
    steps_pending: u32,
    /// The spans that are stepped at once.
    #[pyo3(item)]
    at_once: HashSet<usize>,
    /// `num_settled` when that was decided. Where all has been applied since, the step is exact.
    #[pyo3(item)]
    num_settled: u64,
}

/// What has uses of tensors wait: dicts with what is put into them, and classes with the tensors
/// that get them.
pub(super) type Protection<'py> = (
    Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    Vec<(Bound<'py, PyType>, Vec<Bound<'py, PyAny>>)>,
);

impl PyStore {
    /// See [`PyStore::take`].
    pub(super) fn take_at(
        slf: Bound<'_, Self>,
        mut positions: Vec<usize>,
        buffers: Vec<Py<PyAny>>,
        stream: u64,
        is_deferred: bool,
        order: Option<Vec<usize>>,
    ) -> PyResult<()> {
        let py = slf.py();
        let (engine, gradients, owners) = {
            let store = slf.borrow();
            let looked = positions.iter().map(|&position| store.position(position));
            let looked = looked.collect::<Result<Vec<_>>>()?;
            let place = |at: &usize| {
                order.as_ref().map_or(looked[*at].span, |order| order[looked[*at].span])
            };
            positions = (0..looked.len()).collect();
            positions.sort_by_key(place);
            let mut gradients = Vec::with_capacity(looked.len());
            let mut owners = Vec::with_capacity(looked.len());
            for &at in &positions {
                let one = looked[at];
                let binding = store.spans[one.span].binding.as_ref();
                let target = binding.and_then(Binding::hosted).and_then(|tensor| tensor.grad);
                let Some(target) = target else { continue };
                gradients.push((one.span, one.grad_address as u64, target));
                owners.push(storage(one.grad.bind(py))?);
            }
            (store.engine(py)?, gradients, owners)
        };
        engine.get().take_all(py, &gradients, owners, buffers, stream, is_deferred)
    }

    /// See [`PyStore::submit`].
    #[expect(clippy::too_many_arguments, reason = "as the face has it")]
    pub(super) fn submit_all(
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
        let py = slf.py();
        let mut store = slf.borrow_mut();
        let store = &mut *store;
        let (spans, is_exact) = (store.spans.len(), deferred.is_none());
        let beside = store.beside.as_mut().ok_or_else(not_beside)?;
        beside.resize(spans);
        let num_settled = beside.num_settled;
        let deferred = deferred.filter(|deferred| deferred.num_settled == num_settled);
        let selected =
            selected.map(|selected| if deferred.is_some() || is_exact { selected } else { vec![] });
        let engine = beside.engine.as_ref().map(|engine| engine.clone_ref(py));
        let engine = engine.as_ref().map(Py::get);
        if let Some(engine) = engine {
            engine.drop_returned(py);
        }
        let released = {
            let _atomic = Atomic::begin(py, &store.torch.disable_torch_function)?;
            store.check_in_place(py)?;
            let mut stepped = store.hosted_looked();
            let place = |span: usize| order.as_ref().map_or(span, |order| order[span]);
            stepped.sort_by_key(|&at| place(store.looked[at].span));
            let mut held = store.held_after(py, &deferred)?;
            let updates =
                store.updates(py, &stepped, &hypers, verified.as_ref(), deferred.as_ref())?;
            let mut owners = buffers;
            for &at in &stepped {
                let span = store.looked[at].span;
                if let Some(binding) = &store.spans[span].binding {
                    owners.extend(binding.storages(py));
                    owners.extend(binding.write_backs.iter().map(|call| call.clone_ref(py)));
                }
                if deferred.is_none() {
                    owners.extend(store.weight_storage(py, at)?);
                }
            }
            let pending = store.pending_after(deferred.as_ref());
            let beside = store.beside()?;
            // What is held no more goes with the job, which still writes there.
            for (old, new) in beside.held.iter().zip(&held) {
                if let Some(old) = old
                    && !new.as_ref().is_some_and(|new| new.is(old))
                {
                    owners.push(old.clone_ref(py));
                }
            }
            let landing = store.landing();
            // As many as updates: of what this rank has nothing of there is none.
            let grads: Vec<u64> = match &selected {
                Some(_) => stepped
                    .iter()
                    .map(|&at| &store.looked[at])
                    .filter(|one| store.has_tensor(one.span))
                    .map(|one| one.grad_address as u64)
                    .collect(),
                None => Vec::new(),
            };
            let changes = selected.unwrap_or_default().into_iter();
            let change = |(segment, by_columns, indices)| Change { segment, by_columns, indices };
            let work = OnDevice { grads: &grads, changes: changes.map(change).collect() };
            let blocks = store.blocks(py, &hypers)?;
            let predicted = deferred.as_ref().map(|deferred| deferred.predicted_updates);
            if let Some(engine) = engine {
                // SAFETY: the owners own the memory of host and device; of the program's use of it
                // `docs/` says what it may do.
                unsafe {
                    engine.submit_held(predicted, &updates, work, owners, stream_of(stream))?
                };
            }
            // From here on the step has begun. What follows cannot be refused.
            if let Some(steps) = store.device_steps.as_ref().filter(|_| !blocks.is_empty()) {
                steps.get().launch(blocks, stream).map_err(|error| failed(engine, error))?;
            }
            for call in &begun {
                if let Err(error) = call.bind(py).call0() {
                    let error = io::Error::other(error.value(py).to_string());
                    let what = "what the device steps beside host memory";
                    return Err(failed(engine, Error::os(what, error)).into());
                }
            }
            store.count_updates(py)?;
            store.tell_autograd(py, &landing)?;
            // Last: from here on a look at them waits.
            protect(py, &protection)?;
            let beside = store.beside.as_mut().ok_or_else(not_beside)?;
            beside.pending = pending;
            std::mem::swap(&mut beside.held, &mut held);
            let record = beside.record.replace(record);
            store.has_left = false;
            let looked = std::mem::take(&mut store.looked);
            // The caller binds these in every step, and sees to their memory.
            let bound: Vec<_> = looked.iter().filter_map(|one| store.let_go_of(one.span)).collect();
            (held, record, looked, bound)
        };
        py_drop(py, released);
        Ok(deferred.is_some())
    }

    /// See [`PyStore::record`].
    pub(super) fn last_record(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let record = self.beside.as_ref()?.record.as_ref();
        record.map(|record| record.clone_ref(py))
    }

    /// See [`PyStore::pending`].
    pub(super) fn pending_params(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.params_of(py, self.spans_pending())
    }

    /// See [`PyStore::py_landing`].
    pub(super) fn landing_params(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.params_of(py, self.landing().into_iter().map(|(span, _)| span))
    }

    /// See [`PyStore::held`].
    pub(super) fn held_params(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        let held = self.beside.iter().flat_map(|beside| &beside.held).enumerate();
        self.params_of(py, held.filter(|(_, storage)| storage.is_some()).map(|(span, _)| span))
    }

    fn params_of(&self, py: Python<'_>, spans: impl Iterator<Item = usize>) -> Vec<Py<PyAny>> {
        spans.map(|span| self.spans[span].param.clone_ref(py)).collect()
    }

    /// See [`PyStore::note_settled`].
    pub(super) fn forget_pending(&mut self, py: Python<'_>) {
        if let Some(beside) = &mut self.beside {
            beside.num_settled += 1;
            beside.pending.fill(0);
            let held: Vec<_> = beside.held.iter_mut().map(Option::take).collect();
            py_drop(py, held);
        }
    }
}

/// The error of a step of which a part has failed behind its begin.
fn failed(engine: Option<&PyOffloadEngine>, error: Error) -> Error {
    match engine {
        Some(engine) => engine.fail(error),
        None => error,
    }
}

/// Has uses of tensors wait, but for those that a program has given another class.
fn protect(py: Python<'_>, (entries, classes): &Protection<'_>) -> PyResult<()> {
    for (registry, added) in entries {
        registry.call_method1(intern!(py, "update"), (added,))?;
    }
    for (class, tensors) in classes {
        let base = class.getattr(intern!(py, "__base__"))?;
        for tensor in tensors.iter().filter(|tensor| tensor.get_type().is(&base)) {
            tensor.setattr(intern!(py, "__class__"), class)?;
        }
    }
    Ok(())
}

fn not_beside() -> Error {
    Error::value("the store is of parameters in host memory, expected an engine. hint: step()")
}

impl PyStore {
    /// See [`PyStore::num_settled`].
    pub(super) fn settled_times(&self) -> u64 {
        self.beside.as_ref().map_or(0, |beside| beside.num_settled)
    }

    fn has_tensor(&self, span: usize) -> bool {
        self.spans[span].binding.as_ref().is_some_and(|binding| binding.hosted().is_some())
    }

    pub(super) fn engine(&self, py: Python<'_>) -> Result<Py<PyOffloadEngine>> {
        let engine = self.beside()?.engine.as_ref().ok_or_else(not_beside)?;
        Ok(engine.clone_ref(py))
    }

    fn beside(&self) -> Result<&Beside> {
        self.beside.as_ref().ok_or_else(not_beside)
    }

    fn spans_pending(&self) -> impl Iterator<Item = usize> {
        let pending = self.beside.iter().flat_map(|beside| &beside.pending).enumerate();
        pending.filter(|&(_, &steps)| steps > 0).map(|(span, _)| span)
    }

    /// The positions in the last look of what the host steps.
    fn hosted_looked(&self) -> Vec<usize> {
        let is_hosted = |at: &usize| !self.spans[self.looked[*at].span].is_resident;
        (0..self.looked.len()).filter(is_hosted).collect()
    }

    /// The spans whose weights come from the host with the step, and where each stands in the last
    /// look.
    pub(super) fn landing(&self) -> Vec<(usize, Option<usize>)> {
        let hosted = self.hosted_looked();
        let stepped: HashSet<_> = hosted.iter().map(|&at| self.looked[at].span).collect();
        let own = hosted.into_iter().map(|at| (self.looked[at].span, Some(at)));
        let others = self.spans_pending().filter(|span| !stepped.contains(span));
        own.chain(others.map(|span| (span, None))).collect()
    }

    /// Forgets what was bound of a span whose weight goes where the caller says.
    fn let_go_of(&mut self, span: usize) -> Option<Binding> {
        self.spans[span].binding.take_if(|binding| binding.target.is_some())
    }

    /// What has the memory of a weight on the device; None: the caller sees to it.
    fn weight_storage(&self, py: Python<'_>, at: usize) -> PyResult<Option<Py<PyAny>>> {
        let Looked { span, piece, .. } = &self.looked[at];
        let span = &self.spans[*span];
        if span.binding.as_ref().is_some_and(|binding| binding.target.is_some()) {
            return Ok(None);
        }
        storage(piece.as_ref().unwrap_or(&span.param).bind(py)).map(Some)
    }

    fn updates(
        &self,
        py: Python<'_>,
        stepped: &[usize],
        hypers: &[PyRef<'_, PyHyper>],
        verified: Option<&HashSet<usize>>,
        deferred: Option<&Deferred>,
    ) -> PyResult<Vec<Update>> {
        let mut updates = Vec::with_capacity(stepped.len());
        for &at in stepped {
            let Looked { span, group, piece, .. } = &self.looked[at];
            let Some(binding) = &self.spans[*span].binding else { continue };
            let whole = piece.as_ref().unwrap_or(&self.spans[*span].param).bind(py);
            let weight = match binding.target {
                Some(target) => (target != 0).then_some(target),
                None => Some(address(whole)? as u64),
            };
            let hyper = hypers.get(*group).ok_or_else(|| {
                Error::value(format!("hypers has `{}` groups, expected more", hypers.len()))
            })?;
            let is_verified = verified.is_some_and(|verified| verified.contains(span));
            let Some(tensor) = binding.tensor(is_verified) else { continue };
            updates.push(Update {
                index: *span,
                tensor,
                weight,
                is_at_once: deferred.is_some_and(|deferred| deferred.at_once.contains(span)),
                count: binding.counter.count().map_or(0, |count| count + 1),
                hyper: hyper.0,
            });
        }
        Ok(updates)
    }

    fn pending_after(&self, deferred: Option<&Deferred>) -> Vec<u32> {
        let mut pending = vec![0; self.spans.len()];
        let (Some(deferred), Some(beside)) = (deferred, &self.beside) else { return pending };
        for (left, steps) in pending.iter_mut().zip(&beside.pending) {
            *left = steps.saturating_sub(1);
        }
        for at in self.hosted_looked() {
            pending[self.looked[at].span] = deferred.steps_pending;
        }
        for &span in &deferred.at_once {
            if let Some(left) = pending.get_mut(span) {
                *left = 0;
            }
        }
        pending
    }

    fn held_after(
        &self,
        py: Python<'_>,
        deferred: &Option<Deferred>,
    ) -> PyResult<Vec<Option<Py<PyAny>>>> {
        let mut held: Vec<Option<Py<PyAny>>> = (0..self.spans.len()).map(|_| None).collect();
        if deferred.is_none() {
            return Ok(held);
        }
        let pending = self.pending_after(deferred.as_ref());
        for (span, old) in self.beside()?.held.iter().enumerate() {
            if pending[span] > 0 {
                held[span] = old.as_ref().map(|old| old.clone_ref(py));
            }
        }
        for at in self.hosted_looked() {
            held[self.looked[at].span] = self.weight_storage(py, at)?;
        }
        Ok(held)
    }

    /// Tells autograd of all weights that are written.
    fn tell_autograd(&self, py: Python<'_>, landing: &[(usize, Option<usize>)]) -> PyResult<()> {
        let written = PyList::empty(py);
        for &(span, at) in landing {
            written.append(&self.spans[span].param)?;
            let Some(at) = at else { continue };
            if let Some(piece) = &self.looked[at].piece {
                written.append(piece)?;
            }
        }
        for one in self.residents_looked() {
            written.append(&self.spans[one.span].param)?;
            if let Some(piece) = &one.piece {
                written.append(piece)?;
            }
        }
        self.torch.increment_version(&written)
    }
}
