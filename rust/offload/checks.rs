//! What can be wrong with a call, before anything of it is done. All calls use the same memory.
//!
//! Memory: 8 B per tensor of the engine, and 40 B for each view of it.

use super::{
    generation::Generation,
    job::{Kind, Update},
    ring::Ring,
    segment::Segments,
};
use crate::{
    adam::{
        batch,
        tensor::AdamTensor,
        through::{self, AHEAD_MAX},
    },
    error::{Error, Result},
    state::layout::PARTS_MAX,
    stream::view::{Extents, View},
};

/// Parameter, gradient and weight, beside the parts of the state.
const VIEWS_MAX: usize = PARTS_MAX + 3;

/// See the [module](self).
pub(super) struct Checks {
    names: Names,
    extents: Extents<'static>,
}

/// Which tensors a call has named.
struct Names {
    /// For each tensor the number of the last call that has named it.
    last: Box<[u64]>,
    call: u64,
}

impl Names {
    /// A call begins, which names each tensor once.
    fn begin(&mut self) {
        self.call += 1;
    }

    /// Checks that there is such a tensor, and that it is new in the call.
    fn add(&mut self, tensor: usize, segments: &Segments, call: &str) -> Result<()> {
        segments.check_tensor(tensor)?;
        if std::mem::replace(&mut self.last[tensor], self.call) == self.call {
            return Err(Error::value(format!(
                "tensor `{tensor}` stands twice in a {call}, expected each once"
            )));
        }
        Ok(())
    }
}

impl Checks {
    pub(super) fn new(tensors: usize) -> Self {
        Self {
            names: Names { last: vec![0; tensors].into(), call: 0 },
            extents: Extents::with_capacity(tensors * VIEWS_MAX),
        }
    }

    /// Checks that there are such tensors, each once in a call.
    ///
    /// # Errors
    /// [`Error::Value`] naming one that is not, or is twice.
    pub(super) fn names(
        &mut self,
        mut tensors: impl Iterator<Item = usize>,
        segments: &Segments,
    ) -> Result<()> {
        self.names.begin();
        tensors.try_for_each(|tensor| self.names.add(tensor, segments, "call"))
    }

    /// Whether the last call has named this tensor.
    pub(super) fn is_named(&self, tensor: usize) -> bool {
        self.names.last[tensor] == self.names.call
    }

    /// All that can be wrong with gradients that are taken as a whole.
    ///
    /// # Errors
    /// [`Error::Value`] naming it.
    pub(super) fn gradients(
        &mut self,
        gradients: &[(usize, u64, View)],
        segments: &Segments,
    ) -> Result<()> {
        self.names.begin();
        gradients.iter().try_for_each(|(index, _, host)| {
            self.names.add(*index, segments, "call")?;
            host.expect("the gradient's host memory", &[host.dtype()], segments.numel(*index))
        })
    }

    /// All that can be wrong with the updates of a job by themselves.
    ///
    /// # Errors
    /// [`Error::Value`] naming it.
    pub(super) fn updates(
        &mut self,
        updates: &[Update],
        segments: &Segments,
        ring: Option<&Ring>,
    ) -> Result<()> {
        self.names.begin();
        for Update { index, tensor, hyper, .. } in updates {
            self.names.add(*index, segments, "step")?;
            if tensor.param.numel() != segments.numel(*index) {
                return Err(Error::value(format!(
                    "tensor `{index}` has `{}` elements, expected {}",
                    tensor.param.numel(),
                    segments.numel(*index)
                )));
            }
            hyper.validate()?;
        }
        for (place, update) in updates.iter().enumerate() {
            batch::check_count(place, update.count)?;
            match ring {
                None => batch::grad_of(place, &update.tensor).map(|_| ())?,
                Some(ring) => check_of_ring(update, ring)?,
            }
        }
        let tensors = updates.iter().map(|update| &update.tensor);
        self.extents.check_disjoint(
            tensors.clone().flat_map(AdamTensor::written),
            tensors.filter_map(|tensor| tensor.grad).map(|grad| ("grad", grad)),
        )
    }
}

/// Checks that a tensor can be stepped with gradients that are in the ring.
fn check_of_ring(update: &Update, ring: &Ring) -> Result<()> {
    let Update { index, tensor, .. } = update;
    tensor.check()?;
    through::check(*index, tensor)?;
    let (weight, expected) = (tensor.weight().dtype(), ring.dtype(*index));
    if weight != expected {
        return Err(Error::value(format!(
            "the weight of tensor `{index}` is `{weight}`, expected `{expected}`"
        )));
    }
    Ok(())
}

/// Checks that the engine can take a step of this kind.
///
/// # Errors
/// [`Error::Value`] where it cannot.
pub(super) fn check_kind(kind: Kind, ring: Option<&Ring>) -> Result<()> {
    let Kind::Deferred { predicted_updates } = kind else { return Ok(()) };
    let Some(ring) = ring else {
        return Err(Error::value(
            "a step is deferred, expected an engine with memory for deferred gradients",
        ));
    };
    if !(0.0..=AHEAD_MAX).contains(&predicted_updates) {
        return Err(Error::value(format!(
            "predicted_updates is `{predicted_updates}`, expected 0 to {AHEAD_MAX}"
        )));
    }
    if predicted_updates > 0.0 && !ring.can_predict() {
        return Err(Error::value(format!(
            "predicted_updates is `{predicted_updates}`, expected 0 of an engine without memory \
             for predicted weights"
        )));
    }
    Ok(())
}

/// Checks that all gradients of the updates were taken.
///
/// # Errors
/// [`Error::Value`] naming one that was not.
pub(super) fn check_taken(
    updates: &[Update],
    segments: &Segments,
    ring: &Ring,
    generation: &Generation,
    number: usize,
) -> Result<()> {
    updates.iter().try_for_each(|update| {
        let of = segments.of(update.index);
        let first = ring.whole_gradient(number, segments, update.index, of.start);
        if of.is_empty() || (first.is_some() && generation.target(update.index) == first) {
            return Ok(());
        }
        Err(Error::value(format!(
            "the gradient of tensor `{}` was not taken, expected it before its step",
            update.index
        )))
    })
}

/// Checks that the updates read their gradients where these were taken to.
///
/// # Errors
/// [`Error::Value`] naming one that does not.
pub(super) fn check_targets(updates: &[Update], generation: &Generation) -> Result<()> {
    updates.iter().try_for_each(|update| {
        update.tensor.grad.map_or(Ok(()), |grad| generation.check_target(update.index, grad))
    })
}
