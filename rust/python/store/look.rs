//! The gradients of the step that comes, and what of it has moved.

use std::collections::HashSet;

use pyo3::{
    exceptions::PyValueError,
    gc::{PyTraverseError, PyVisit},
    intern,
    prelude::*,
    types::{PyDict, PyString},
};

use super::{
    Memory, PyStore,
    atomic::Atomic,
    py_drop,
    span::{Binding, Counter, Part, Place, Span},
    torch::{Dense, address, storage},
};
use crate::{
    grads::stats,
    python::{
        adam::{PyAdamTensor, PyGradStats},
        host::PyPool,
        logging::run,
    },
    simd::isa::Isa,
    stream::view::View,
};

/// A parameter of the step that comes, which has a gradient.
pub(super) struct Looked {
    pub(super) span: usize,
    /// Which group it is of.
    pub(super) group: usize,
    /// Which parameter of all groups.
    pub(super) ordinal: usize,
    /// The gradient that is stepped: the parameter's own, or what Python made of it.
    pub(super) grad: Py<PyAny>,
    /// Where it was.
    pub(super) grad_address: usize,
    /// It as the core reads it in host memory; None: it comes down from a device.
    pub(super) grad_view: Option<View>,
    /// What is stepped of the parameter, where that is not the parameter itself.
    pub(super) piece: Option<Py<PyAny>>,
    /// Whether it can be stepped: it was bound.
    pub(super) is_ready: bool,
}

impl Looked {
    /// Shows the collector of garbage what it holds.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.grad)?;
        visit.call(&self.piece)
    }
}

/// What a look at the gradients has found.
///
/// Attributes:
///     params: the parameters that have a gradient, in the order of the groups.
///     grads: of each its gradient.
///     moved: the positions, in these lists, of what has to be bound before the step.
///     groups: of each which group it is of.
///     on_device: the positions of those whose state the device has.
///     num_seen: how many of the store's parameters are in the groups.
///     has_unknown: whether one that has a gradient is not the store's.
#[pyclass(name = "Look", module = "stepwell._core", frozen)]
pub(in crate::python) struct PyLook {
    params: Vec<Py<PyAny>>,
    grads: Vec<Py<PyAny>>,
    #[pyo3(get)]
    moved: Vec<usize>,
    #[pyo3(get)]
    groups: Vec<usize>,
    #[pyo3(get)]
    on_device: Vec<usize>,
    #[pyo3(get)]
    num_seen: usize,
    #[pyo3(get)]
    has_unknown: bool,
}

#[pymethods]
impl PyLook {
    #[getter]
    fn params(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.params.iter().map(|param| param.clone_ref(py)).collect()
    }

    #[getter]
    fn grads(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.grads.iter().map(|grad| grad.clone_ref(py)).collect()
    }
}

impl PyStore {
    /// See [`PyStore::look`].
    pub(super) fn look_at(
        &mut self,
        py: Python<'_>,
        groups: Vec<Vec<Bound<'_, PyAny>>>,
        states: Option<Bound<'_, PyAny>>,
        grads: Option<&[Bound<'_, PyAny>]>,
    ) -> PyResult<PyLook> {
        let before = std::mem::take(&mut self.looked);
        let (found, left) = {
            let _atomic = Atomic::begin(py, &self.torch.disable_torch_function)?;
            let states = states.map(|states| states.cast_into::<PyDict>()).transpose()?;
            let (found, seen) = self.find(py, &groups, states.as_ref(), grads)?;
            let left = if self.beside.is_none() { self.let_go(&seen) } else { vec![] };
            (found, left)
        };
        py_drop(py, (before, left));
        Ok(found)
    }

    /// See [`PyStore::bind`].
    #[expect(clippy::too_many_arguments, reason = "as the face has it")]
    pub(super) fn bind_at(
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
        let parts = parts
            .iter()
            .map(|(name, value, piece)| Part::new(name, value, piece))
            .collect::<PyResult<Vec<_>>>()?;
        let place = Place::Host(tensor.as_ref().map(|tensor| tensor.0));
        self.bind_place(
            py,
            position,
            place,
            grad,
            state,
            parts,
            piece,
            target,
            is_kept,
            write_backs,
        )
    }

    /// Binds what is at `position` of the last look, whose state is at `place`.
    #[expect(clippy::too_many_arguments, reason = "as the face has it")]
    pub(super) fn bind_place(
        &mut self,
        py: Python<'_>,
        position: usize,
        place: Place,
        grad: Bound<'_, PyAny>,
        state: Bound<'_, PyAny>,
        parts: Vec<Part>,
        piece: Option<Bound<'_, PyAny>>,
        target: Option<u64>,
        is_kept: bool,
        write_backs: Vec<Py<PyAny>>,
    ) -> PyResult<()> {
        let (ordinal, span) = {
            let looked = self.position(position)?;
            (looked.ordinal, looked.span)
        };
        let state = state.cast_into::<PyDict>()?;
        let Some(counter) = state.get_item(intern!(py, "step"))? else {
            return Err(PyValueError::new_err("a state has no `step`, expected a count"));
        };
        let counter = Counter::new(&counter)?;
        if counter.count().is_none() {
            return Err(PyValueError::new_err("`step` of a state is no count, expected one"));
        }
        let param = self.spans[span].param.bind(py);
        let is_plain = piece.is_none() && is_kept;
        let weight = if is_plain { Some(address(param)?) } else { None };
        let numel = match (target, &place) {
            (Some(_), Place::Host(tensor)) => tensor.map_or(0, |tensor| tensor.param.numel()),
            _ => param.call_method0(intern!(py, "numel"))?.extract()?,
        };
        let grad_address = address(&grad)?;
        let is_beside = self.beside.is_some();
        let grad_view = match place {
            Place::Host(tensor) if !is_beside => tensor.and_then(|tensor| tensor.grad),
            _ => None,
        };
        let binding = Binding {
            place,
            weight,
            numel,
            target,
            state: state.unbind(),
            parts,
            counter,
            ordinal,
            write_backs,
        };
        let looked = &mut self.looked[position];
        let before = (
            std::mem::replace(&mut looked.grad, grad.unbind()),
            std::mem::replace(&mut looked.piece, piece.map(Bound::unbind)),
            self.spans[span].binding.replace(binding),
        );
        looked.grad_address = grad_address;
        looked.grad_view = grad_view;
        looked.is_ready = true;
        self.written = None;
        py_drop(py, before);
        Ok(())
    }

    /// See [`PyStore::overlapping`].
    pub(super) fn find_overlapping(&mut self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let written = match self.written.take() {
            _ if self.beside.is_some() => self.weights_written(py)?,
            written => self.memory_written(written),
        };
        let spans = &self.spans;
        let overlaps = |one: &Looked| {
            let extent = spans[one.span].binding.as_ref().and_then(Binding::extent);
            let nbytes = extent.map_or(0, |(numel, dtype)| {
                numel * one.grad_view.map_or(dtype, |view| view.dtype()).size()
            });
            let (begin, end) = (one.grad_address, one.grad_address + nbytes);
            // Runs are disjoint: of those that begin before the end, the last reaches furthest.
            let before = written.1.partition_point(|&(start, _)| start < end);
            nbytes > 0 && before > 0 && written.1[before - 1].0 + written.1[before - 1].1 > begin
        };
        let looked = self.looked.iter().enumerate();
        let found = looked.filter(|(_, one)| one.is_ready && overlaps(one)).map(|(at, _)| at);
        let found = found.collect();
        self.written = Some(written);
        Ok(found)
    }

    /// The memory that a step in host memory writes; `before`: that of the step before.
    fn memory_written(&self, before: Option<Memory>) -> Memory {
        let ready = self.looked.iter().filter(|one| one.is_ready).map(|one| one.span);
        let stepped: Vec<_> = ready.collect();
        if let Some(before) = before.filter(|(of, _)| *of == stepped) {
            return before;
        }
        let bound = stepped.iter().filter_map(|&span| self.spans[span].binding.as_ref());
        let tensors = bound.filter_map(Binding::hosted);
        let views =
            tensors.flat_map(|tensor| tensor.written().map(|(_, view)| view).collect::<Vec<_>>());
        let mut written: Vec<_> = views.map(|view| (view.address(), view.nbytes())).collect();
        written.retain(|&(_, nbytes)| nbytes > 0);
        written.sort_unstable();
        (stepped, written)
    }

    /// The weights on the device that a step writes, of those that it steps, and of those that are
    /// pending.
    fn weights_written(&self, py: Python<'_>) -> PyResult<Memory> {
        let residents = self.looked.iter().enumerate();
        let residents = residents.filter(|(_, one)| self.spans[one.span].is_resident);
        let residents = residents.map(|(at, one)| (one.span, Some(at)));
        let mut written = Vec::new();
        for (span, at) in self.landing().into_iter().chain(residents) {
            let Span { param, binding: Some(binding), .. } = &self.spans[span] else { continue };
            let piece = at.and_then(|at| self.looked[at].piece.as_ref());
            let Some((numel, dtype)) = binding.extent() else { continue };
            let (begin, numel) = match (piece, binding.weight) {
                // Rows that other ranks step are written as well.
                (None, Some(weight)) if at.is_some() => (weight, binding.numel),
                (Some(piece), _) => (address(piece.bind(py))?, numel),
                (None, _) => match param.bind(py).getattr_opt(intern!(py, "_local_tensor"))? {
                    Some(local) => (address(&local)?, numel),
                    None => (address(param.bind(py))?, binding.numel),
                },
            };
            if numel > 0 {
                written.push((begin, numel * dtype.size()));
            }
        }
        written.sort_unstable();
        Ok((vec![], written))
    }

    /// See [`PyStore::numbers`].
    pub(super) fn numbers_of_updates(&self) -> Vec<u64> {
        let number = |one: &Looked| {
            let binding = self.spans[one.span].binding.as_ref().filter(|_| one.is_ready);
            binding.and_then(|binding| binding.counter.count()).map_or(0, |count| count + 1)
        };
        self.looked.iter().map(number).collect()
    }

    /// See [`PyStore::stats`].
    pub(super) fn stats_of(slf: Bound<'_, Self>) -> PyResult<PyGradStats> {
        let py = slf.py();
        let (views, _owners) = {
            let store = slf.borrow();
            let views: Vec<_> = store.looked.iter().filter_map(|one| one.grad_view).collect();
            let owners = store
                .looked
                .iter()
                .map(|one| storage(one.grad.bind(py)))
                .collect::<PyResult<Vec<_>>>()?;
            (views, owners)
        };
        let pool = PyPool::pool(None);
        // SAFETY: the storages are held; the program vouches that it writes no gradient meanwhile.
        let stats =
            run(py, || unsafe { stats::grad_stats(pool.get()?, Isa::detect()?, &views, false) })?;
        Ok(PyGradStats(stats))
    }
}

impl PyStore {
    fn find(
        &mut self,
        py: Python<'_>,
        groups: &[Vec<Bound<'_, PyAny>>],
        states: Option<&Bound<'_, PyDict>>,
        given: Option<&[Bound<'_, PyAny>]>,
    ) -> PyResult<(PyLook, HashSet<usize>)> {
        let (mut params, mut grads) = (Vec::new(), Vec::new());
        let (mut moved, mut seen, mut has_unknown) = (Vec::new(), HashSet::new(), false);
        let states = states.map(by_param).transpose()?;
        let mut ordinal = 0;
        for (group, list) in groups.iter().enumerate() {
            for param in list {
                let at = ordinal;
                ordinal += 1;
                let known = self.by_param.get(&(param.as_ptr() as usize)).copied();
                seen.extend(known);
                let grad = match given {
                    Some(grads) => grads[at].clone(),
                    None => param.getattr(intern!(py, "grad"))?,
                };
                if grad.is_none() {
                    continue;
                }
                let span = match known {
                    Some(span) => span,
                    None if self.beside.is_none() => {
                        let span = self.insert(param, false);
                        seen.insert(span);
                        span
                    }
                    None => {
                        has_unknown = true;
                        continue;
                    }
                };
                let found = self.spans[span].as_bound(&self.torch, param, &grad, at)?;
                let found = found.filter(|dense| self.fits(&self.spans[span], dense));
                let is_same = match (&self.spans[span].binding, &states) {
                    (Some(binding), Some(states)) => {
                        binding.has(states.get(&(param.as_ptr() as usize)))?
                    }
                    _ => true,
                };
                let found = found.filter(|_| is_same);
                if found.is_none() {
                    moved.push(self.looked.len());
                }
                let grad_view = match &found {
                    Some(dense) if self.beside.is_none() => {
                        let numel = dense.nbytes / dense.dtype.size();
                        Some(View::new(dense.address, dense.dtype, numel)?)
                    }
                    _ => None,
                };
                params.push(param.clone().unbind());
                grads.push(grad.clone().unbind());
                self.looked.push(Looked {
                    span,
                    group,
                    ordinal: at,
                    grad: grad.unbind(),
                    grad_address: found.as_ref().map_or(0, |dense| dense.address),
                    grad_view,
                    piece: None,
                    is_ready: found.is_some(),
                });
            }
        }
        let num_seen = seen.len();
        let groups = self.looked.iter().map(|one| one.group).collect();
        let on_device = self.looked.iter().enumerate();
        let on_device = on_device.filter(|(_, one)| self.spans[one.span].is_resident);
        let on_device = on_device.map(|(at, _)| at).collect();
        Ok((PyLook { params, grads, moved, groups, on_device, num_seen, has_unknown }, seen))
    }

    /// Forgets the spans that are in no group any more, and returns them.
    fn let_go(&mut self, seen: &HashSet<usize>) -> Vec<Span> {
        if seen.len() == self.spans.len() {
            return vec![];
        }
        let (mut left, mut places) = (Vec::new(), vec![0; self.spans.len()]);
        let mut kept = Vec::with_capacity(seen.len());
        for (at, span) in std::mem::take(&mut self.spans).into_iter().enumerate() {
            places[at] = kept.len();
            if seen.contains(&at) { kept.push(span) } else { left.push(span) }
        }
        self.spans = kept;
        self.by_param.retain(|_, span| seen.contains(span));
        self.by_param.values_mut().for_each(|span| *span = places[*span]);
        self.looked.iter_mut().for_each(|one| one.span = places[one.span]);
        self.written = None;
        left
    }

    /// Whether a dense gradient is where, and of the dtype that, a step of the span reads.
    fn fits(&self, span: &Span, grad: &Dense) -> bool {
        match (&self.beside, &span.binding) {
            (None, Some(_)) => grad.is_cpu,
            (Some(beside), Some(binding)) => {
                grad.is_cpu == beside.is_on_cpu
                    && binding.extent().is_some_and(|(_, dtype)| dtype == grad.dtype)
                    && binding.is_aligned(grad.address)
            }
            _ => false,
        }
    }
}

/// States by the address of the parameter's object. Those that are empty are none.
fn by_param<'py>(
    states: &Bound<'py, PyDict>,
) -> PyResult<std::collections::HashMap<usize, Bound<'py, PyDict>>> {
    let mut found = std::collections::HashMap::with_capacity(states.len());
    for (param, state) in states.iter() {
        if let Ok(state) = state.cast_into::<PyDict>()
            && !state.is_empty()
        {
            found.insert(param.as_ptr() as usize, state);
        }
    }
    Ok(found)
}
