//! One parameter of a step: what its state is ([`Layout`]), where that is, its weight and its
//! gradient.
//!
//! The layout follows from the names and dtypes of the parts that are given. Everything is checked
//! here, once, so that a step has nothing left to refuse but gradients and overlaps.
//!
//! What is said of one view can be said of what stands for it (`V`): a step of a chunk takes the
//! [`Route`](crate::stream::view::Route) of each.

use std::ops::Range;

use crate::{
    error::{Error, Result},
    state::{
        codecs::{FINGERPRINTS, MasterKind, MomentsKind},
        layout::{Field, Layout, PARTS_MAX},
        part::Part,
    },
    stream::{element::Dtype, view::View},
};

/// The dtypes of parameters and gradients.
const FLOATS: [Dtype; 3] = [Dtype::Float32, Dtype::BFloat16, Dtype::Float16];

/// One parameter with its state.
#[derive(Clone, Copy, Debug)]
pub struct AdamTensor<V = View> {
    /// The parameter.
    pub param: V,
    /// The rounded copy of an fp32 parameter, where it has one: written, and never read.
    pub weight_out: Option<V>,
    /// Its gradient, where it has one.
    pub grad: Option<View>,
    /// Decorrelates the stochastic rounding of different parameters.
    pub key: u64,
    layout: Layout,
    /// In the layout's order; what is behind its parts stands for nothing.
    parts: [V; PARTS_MAX],
}

impl AdamTensor {
    /// Finds the layout and checks all names, sizes and dtypes. `parts` are those of the state, by
    /// their names, in any order.
    ///
    /// # Errors
    /// [`Error::Value`] naming what does not fit.
    pub fn new(
        param: View,
        parts: &[(&str, View)],
        grad: Option<View>,
        weight_out: Option<View>,
        key: u64,
    ) -> Result<Self> {
        let numel = param.numel();
        param.expect("param", &FLOATS, numel)?;
        if let Some(weight) = weight_out {
            if param.dtype() != Dtype::Float32 {
                return Err(unexpected("weight_out", param));
            }
            weight.expect("weight_out", &[Dtype::BFloat16, Dtype::Float16], numel)?;
        }
        let master = master_of(param, parts);
        let moments = moments_of(param, master, parts)?;
        let weight_dtype = weight_out.map(|weight| weight.dtype());
        let layout = Layout::new(param.dtype(), master, moments, weight_dtype, numel)?;
        let mut found = [param; PARTS_MAX];
        for (part, place) in layout.parts().zip(&mut found) {
            *place = find(part, parts)?;
        }
        let is_known = |name: &str| layout.parts().any(|part| part.name == name);
        if let Some((name, _)) = parts.iter().find(|(name, _)| !is_known(name)) {
            return Err(unexpected(name, param));
        }
        let tensor = Self { param, weight_out, grad, key, layout, parts: found };
        tensor.check()?;
        Ok(tensor)
    }

    /// Checks all views against the layout. They can be replaced after [`AdamTensor::new`].
    ///
    /// # Errors
    /// [`Error::Value`] naming one that does not fit.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { param, weight_out, grad, layout, parts, .. } = self;
        let (own, numel) = ([layout.param], layout.numel());
        param.expect("param", &own, numel)?;
        for (part, view) in layout.parts().zip(parts) {
            view.expect(part.name, &[part.dtype], part.len(numel)?)?;
        }
        match (weight_out, layout.weight_out) {
            (Some(weight), Some(dtype)) => {
                weight.expect("weight_out", &[dtype], numel)?;
            }
            (None, None) => {}
            (Some(_), None) => return Err(unexpected("weight_out", *param)),
            (None, Some(dtype)) => {
                return Err(Error::value(format!("weight_out is not given, expected `{dtype}`")));
            }
        }
        let Some(grad) = grad else { return Ok(()) };
        let dtypes = if layout.master == MasterKind::Plain16 { &own[..] } else { &FLOATS };
        grad.expect("grad", dtypes, numel)
    }

    /// What the model computes with: the 16-bit copy of an fp32 master where there is one, else the
    /// parameter.
    #[must_use]
    pub fn weight(&self) -> View {
        self.weight_out.unwrap_or(self.param)
    }

    /// The state of one of its chunks, as a tensor of its own, without gradient.
    #[must_use]
    pub fn chunk(&self, index: usize) -> Self {
        let part = |field: Field, view: View| view.part(self.layout.chunk_range(&field, index));
        Self { grad: None, layout: self.layout.chunk(index), ..self.map(part) }
    }

    /// The state of a run of its elements, as a tensor of its own, without gradient. It is to be
    /// read: the last entries of q8 moments may be of elements behind the run too.
    ///
    /// # Panics
    /// If the run is not within the tensor, or begins within a block of q8 moments, or the tensor
    /// has fingerprints: they are of whole chunks.
    #[must_use]
    pub fn elements(&self, range: Range<usize>) -> Self {
        assert!(self.fingerprints().is_none(), "a run has no fingerprint");
        let layout = self.layout.elements(range.len());
        let part =
            |field: Field, view: View| view.part(self.layout.run_range(&field, range.clone()));
        Self { grad: None, layout, ..self.map(part) }
    }

    /// The same without fingerprints of its chunks: its maker vouches that steps alone write the
    /// parameter.
    #[must_use]
    pub fn without_fingerprints(mut self) -> Self {
        if let MasterKind::Split { has_fingerprints } = &mut self.layout.master {
            // They are the last part.
            *has_fingerprints = false;
        }
        self
    }
}

impl<V: Copy> AdamTensor<V> {
    /// What its state consists of.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The parts of its moments, in the order of their codec.
    #[must_use]
    pub fn moments(&self) -> &[V] {
        &self.parts[..self.num_moments()]
    }

    /// The parts of its master beside the parameter.
    #[must_use]
    pub fn master(&self) -> &[V] {
        let num_moments = self.num_moments();
        &self.parts[num_moments..num_moments + self.layout.master.parts().len()]
    }

    fn num_moments(&self) -> usize {
        self.layout.moments.parts(self.layout.param).len()
    }

    /// The fingerprints of its chunks, where it has some.
    #[must_use]
    pub fn fingerprints(&self) -> Option<V> {
        let place = self.layout.parts().position(|part| part.name == FINGERPRINTS);
        place.map(|place| self.parts[place])
    }

    /// The same of what `of` makes of each view that a step writes, in the order of the layout's
    /// fields.
    pub fn map<U: Copy>(&self, mut of: impl FnMut(Field, V) -> U) -> AdamTensor<U> {
        let mut fields = self.layout.fields();
        let mut next = |view: V| {
            of(fields.next().unwrap_or_else(|| unreachable!("a field for each view")), view)
        };
        let param = next(self.param);
        let mut parts = [param; PARTS_MAX];
        for (of_part, view) in parts.iter_mut().zip(self.moments().iter().chain(self.master())) {
            *of_part = next(*view);
        }
        let weight_out = self.weight_out.map(next);
        let Self { grad, key, layout, .. } = *self;
        AdamTensor { param, weight_out, grad, key, layout, parts }
    }

    /// Everything that a step writes, with names.
    pub fn written(&self) -> impl Iterator<Item = (&'static str, V)> {
        let views = std::iter::once(self.param)
            .chain(self.moments().iter().chain(self.master()).copied())
            .chain(self.weight_out);
        self.layout.fields().map(|field| field.part.name).zip(views)
    }
}

fn has(parts: &[(&str, View)], part: &Part) -> bool {
    parts.iter().any(|(name, _)| *name == part.name)
}

fn find(part: &Part, parts: &[(&str, View)]) -> Result<View> {
    let found = parts.iter().find(|(name, _)| *name == part.name).map(|(_, view)| *view);
    found.ok_or_else(|| {
        let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
        Error::value(format!(
            "{} is not given, expected `{}` beside {}",
            part.name,
            part.dtype,
            names.join(", ")
        ))
    })
}

fn unexpected(name: &str, param: View) -> Error {
    Error::value(format!("{name} is given for a `{}` parameter, expected none", param.dtype()))
}

/// The kind of master that these parts are of: with all bits, if one of its parts is given.
fn master_of(param: View, parts: &[(&str, View)]) -> MasterKind {
    match (param.dtype(), MasterKind::exact(param.dtype())) {
        (Dtype::Float32, _) => MasterKind::Float32,
        (_, Ok(exact)) if exact.parts().iter().any(|part| has(parts, part)) => match exact {
            MasterKind::Split { .. } => {
                let has_fingerprints = parts.iter().any(|(name, _)| *name == FINGERPRINTS);
                MasterKind::Split { has_fingerprints }
            }
            other => other,
        },
        _ => MasterKind::Plain16,
    }
}

/// The codec that these parts are of: that whose first part is given, in its dtype.
fn moments_of(param: View, master: MasterKind, parts: &[(&str, View)]) -> Result<MomentsKind> {
    let plain = (master == MasterKind::Plain16).then_some(MomentsKind::Nearest16);
    let kinds = || plain.into_iter().chain(MomentsKind::ALL.iter().copied());
    let first = |kind: MomentsKind| &kind.parts(param.dtype())[0];
    let is_given = |kind: &MomentsKind| {
        parts
            .iter()
            .any(|(name, view)| *name == first(*kind).name && view.dtype() == first(*kind).dtype)
    };
    kinds().find(is_given).ok_or_else(|| {
        let given = parts.iter().find(|(name, _)| kinds().any(|kind| *name == first(kind).name));
        let given =
            given.map_or("is not given".to_owned(), |(_, view)| format!("is `{}`", view.dtype()));
        let expected: Vec<String> =
            kinds().map(|kind| format!("{} in {}", first(kind).name, first(kind).dtype)).collect();
        Error::value(format!("exp_avg {given}, expected {}", expected.join(" or ")))
    })
}
