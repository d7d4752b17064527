//! One run with one state, as a store knows it: what Python has bound, and how it is seen to be
//! as it was.

use pyo3::{
    gc::{PyTraverseError, PyVisit},
    intern,
    prelude::*,
    types::{PyDict, PyString},
};

use super::torch::{Dense, Torch, address, dense, is_at, storage};
use crate::{adam::tensor::AdamTensor, stream::element::Dtype};

/// A tensor of a state that a step works with.
pub(super) struct Part {
    name: Py<PyString>,
    /// What the state has under this name.
    value: Py<PyAny>,
    /// Of that, what this rank has: the same tensor, unless the state is sharded.
    piece: Py<PyAny>,
    address: usize,
    /// It stays where the program gives the tensor other memory.
    pub(super) storage: Py<PyAny>,
}

impl Part {
    pub(super) fn new(
        name: &Bound<'_, PyString>,
        value: &Bound<'_, PyAny>,
        piece: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            name: name.clone().unbind(),
            value: value.clone().unbind(),
            piece: piece.clone().unbind(),
            address: address(piece)?,
            storage: storage(piece)?,
        })
    }

    fn is_in(&self, state: &Bound<'_, PyDict>) -> PyResult<bool> {
        let py = state.py();
        let found = state.get_item(&self.name)?;
        Ok(found.is_some_and(|value| value.is(&self.value))
            && is_at(self.piece.bind(py), self.address))
    }
}

/// The count of updates in a state.
pub(super) enum Counter {
    /// An fp32 number on the CPU, as torch's optimizers have it.
    Tensor { value: Py<PyAny>, address: usize, storage: Py<PyAny> },
    /// A number of Python's, as DeepSpeed's have it.
    Number(u64),
}

/// Beyond it fp32 does not have every count.
const COUNT_MAX: f32 = 16_777_216.0;

impl Counter {
    pub(super) fn new(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(count) = value.extract::<u64>() {
            return Ok(Self::Number(count));
        }
        let (address, storage) = (address(value)?, storage(value)?);
        Ok(Self::Tensor { value: value.clone().unbind(), address, storage })
    }

    fn is_in(&self, state: &Bound<'_, PyDict>) -> PyResult<bool> {
        let py = state.py();
        let found = state.get_item(intern!(py, "step"))?;
        Ok(match self {
            Self::Tensor { value: known, address, .. } => {
                found.is_some_and(|value| value.is(known)) && is_at(known.bind(py), *address)
            }
            Self::Number(count) => {
                found.is_some_and(|value| value.extract::<u64>().is_ok_and(|found| found == *count))
            }
        })
    }

    /// How many updates the state has seen; None: it is no count.
    pub(super) fn count(&self) -> Option<u64> {
        let address = match self {
            Self::Tensor { address, .. } => address,
            Self::Number(count) => return Some(*count),
        };
        // SAFETY: `storage` owns the memory, which was looked at last by `is_in`, or has just been
        // bound; the interpreter's lock keeps other Python code from it.
        let count = unsafe { (*address as *const f32).read_unaligned() };
        (count >= 0.0 && count.fract() == 0.0 && count <= COUNT_MAX).then_some(count as u64)
    }

    /// The state has seen so many updates. Spans of one state may all say so.
    pub(super) fn set(&mut self, count: u64, state: &Bound<'_, PyDict>) -> PyResult<()> {
        match self {
            Self::Tensor { address, .. } => {
                // SAFETY: as in `count`.
                unsafe { (*address as *mut f32).write_unaligned(count as f32) };
                Ok(())
            }
            Self::Number(known) => {
                *known = count;
                state.set_item(intern!(state.py(), "step"), count)
            }
        }
    }

    fn value(&self) -> Option<&Py<PyAny>> {
        if let Self::Tensor { value, .. } = self { Some(value) } else { None }
    }

    fn storage(&self) -> Option<&Py<PyAny>> {
        if let Self::Tensor { storage, .. } = self { Some(storage) } else { None }
    }
}

/// A state that the device has.
pub(super) struct OnDevice {
    /// Where it is.
    pub(super) address: u64,
    /// Of the weight and its gradient.
    pub(super) dtype: Dtype,
    /// It stays where the optimizer lets go of the state before the step is over.
    pub(super) storage: Py<PyAny>,
}

/// Where the state of a span is.
#[expect(clippy::large_enum_variant, reason = "most are in host memory, and are read in each step")]
pub(super) enum Place {
    /// In host memory or on a volume; None: this rank has nothing of the parameter.
    Host(Option<AdamTensor>),
    /// On the device, which steps it.
    Device(OnDevice),
}

/// A span as it was bound: what the next step works with while nothing has moved.
pub(super) struct Binding {
    pub(super) place: Place,
    /// Where the parameter was; None: it is looked at by Python in every step.
    pub(super) weight: Option<usize>,
    /// Elements of the parameter.
    pub(super) numel: usize,
    /// Where on the device the new weight goes, in memory that the caller keeps alive; 0: nowhere.
    /// None: to the parameter.
    pub(super) target: Option<u64>,
    pub(super) state: Py<PyDict>,
    pub(super) parts: Vec<Part>,
    pub(super) counter: Counter,
    /// What the stochastic rounding follows from beside that: which parameter of the groups it is.
    pub(super) ordinal: usize,
    /// Calls that finish a step: a tensor that is no run was copied, and is copied back.
    pub(super) write_backs: Vec<Py<PyAny>>,
}

impl Binding {
    /// Whether a step may go on with the state that was bound.
    ///
    /// `found`: what the optimizer has of the parameter now.
    pub(super) fn has(&self, found: Option<&Bound<'_, PyDict>>) -> PyResult<bool> {
        let Some(state) = found else { return Ok(false) };
        if !state.is(&self.state) || !self.counter.is_in(state)? {
            return Ok(false);
        }
        for part in &self.parts {
            if !part.is_in(state)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What the core steps in host memory, or on a volume; None: nothing.
    pub(super) fn hosted(&self) -> Option<AdamTensor> {
        if let Place::Host(tensor) = &self.place { *tensor } else { None }
    }

    /// Elements that are stepped, and their dtype; None: this rank has nothing of the parameter.
    pub(super) fn extent(&self) -> Option<(usize, Dtype)> {
        match &self.place {
            Place::Host(tensor) => tensor.map(|one| (one.param.numel(), one.param.dtype())),
            Place::Device(state) => Some((self.numel, state.dtype)),
        }
    }

    /// Whether a gradient at this address can be read by what steps it.
    pub(super) fn is_aligned(&self, address: usize) -> bool {
        match &self.place {
            Place::Host(_) => true,
            Place::Device(state) => address.is_multiple_of(state.dtype.size()),
        }
    }

    /// The tensor of a step, with fingerprints or without.
    pub(super) fn tensor(&self, with_fingerprints: bool) -> Option<AdamTensor> {
        let tensor = self.hosted()?;
        let has = tensor.fingerprints().is_some();
        Some(if has && !with_fingerprints { tensor.without_fingerprints() } else { tensor })
    }

    /// What keeps its memory alive.
    pub(super) fn storages<'a>(&'a self, py: Python<'a>) -> impl Iterator<Item = Py<PyAny>> + 'a {
        let parts = self.parts.iter().map(|part| &part.storage);
        parts.chain(self.counter.storage()).map(move |storage| storage.clone_ref(py))
    }
}

/// A parameter, or what this rank has of it.
pub(super) struct Span {
    pub(super) param: Py<PyAny>,
    /// Whether the device has its state, and steps it.
    pub(super) is_resident: bool,
    pub(super) binding: Option<Binding>,
}

impl Span {
    /// Shows the collector of garbage what it holds.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.param)?;
        let Some(binding) = &self.binding else { return Ok(()) };
        visit.call(&binding.state)?;
        if let Place::Device(state) = &binding.place {
            visit.call(&state.storage)?;
        }
        for part in &binding.parts {
            visit.call(&part.value)?;
            visit.call(&part.piece)?;
            visit.call(&part.storage)?;
        }
        visit.call(binding.counter.value())?;
        visit.call(binding.counter.storage())?;
        binding.write_backs.iter().try_for_each(|call| visit.call(call))
    }

    /// Where the gradient of a plain parameter is, if a step can go on as it was bound.
    pub(super) fn as_bound(
        &self,
        torch: &Torch,
        param: &Bound<'_, PyAny>,
        grad: &Bound<'_, PyAny>,
        ordinal: usize,
    ) -> PyResult<Option<Dense>> {
        let Some(binding) = &self.binding else { return Ok(None) };
        let Binding { weight: Some(weight), ordinal: was, numel, .. } = binding else {
            return Ok(None);
        };
        if !(torch.is_plain(param) && torch.is_plain(grad)) || *was != ordinal {
            return Ok(None);
        }
        let Some(now) = dense(param)? else { return Ok(None) };
        let dtype = binding.extent().map_or(now.dtype, |(_, dtype)| dtype);
        let is_there = now.address == *weight && now.nbytes == numel * dtype.size();
        if !is_there || now.dtype != dtype {
            return Ok(None);
        }
        Ok(dense(grad)?.filter(|dense| dense.nbytes == numel * dense.dtype.size()))
    }
}
