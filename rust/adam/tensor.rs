//! One parameter of a step: where its weight and state are, and in which layout.
//!
//! The layout follows from the dtypes of what is given ([`MasterLayout`], [`MomentsLayout`]);
//! everything is checked here, once, so that a step has nothing left to refuse but gradients and
//! overlaps.
//!
//! What is said of one view can be said of what stands for it (`V`): a step of a chunk takes the
//! [`Route`](crate::stream::view::Route) of each.

use crate::{
    error::{Error, Result},
    state::{
        chunk::{CHUNK_LEN, num_chunks},
        q8,
    },
    stream::{element::Dtype, view::View},
};

/// Where a parameter's master is.
#[derive(Clone, Copy, Debug)]
pub enum MasterLayout<V = View> {
    /// The fp32 parameter is the master; its rounded copy may be written beside it.
    Float32 {
        /// A bf16 or fp16 weight, written in the same pass and never read.
        weight_out: Option<V>,
    },
    /// A bf16 parameter, its trailing bits and the fingerprints of its chunks.
    Split {
        /// 16 bits per element.
        trailing: V,
        /// 32 bits per chunk, which tell whether the parameter is what the trailing bits belong to.
        /// Without: whoever made this vouches that steps alone write the parameter.
        fingerprints: Option<V>,
    },
    /// An fp16 parameter beside its fp32 master.
    Shadowed {
        /// The master.
        master: V,
    },
    /// A 16-bit parameter without a master, rounded to nearest.
    Plain16,
}

/// How a parameter's moments are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentsLayout<V = View> {
    /// fp32.
    Float32,
    /// bf16, rounded stochastically.
    Stochastic,
    /// The dtype of a plain 16-bit parameter, rounded to nearest.
    Nearest16,
    /// 8-bit codes with scales.
    Q8 {
        /// Scales of `exp_avg`.
        exp_avg_scales: V,
        /// Scales of `exp_avg_sq`.
        exp_avg_sq_scales: V,
    },
}

/// One parameter with its state.
#[derive(Clone, Copy, Debug)]
pub struct AdamTensor<V = View> {
    /// The parameter.
    pub param: V,
    /// Its gradient, where it has one.
    pub grad: Option<View>,
    /// `exp_avg`: values, or codes.
    pub exp_avg: V,
    /// `exp_avg_sq`: values, or codes.
    pub exp_avg_sq: V,
    /// Where the master is.
    pub master: MasterLayout<V>,
    /// How the moments are held.
    pub moments: MomentsLayout<V>,
    /// Decorrelates the stochastic rounding of different parameters.
    pub key: u64,
}

/// What may lie beside a parameter; which of them are there decides the layout.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beside {
    /// `master` of a shadowed fp16 parameter.
    pub master: Option<View>,
    /// Trailing bits of a split parameter.
    pub trailing: Option<View>,
    /// Fingerprints of a split parameter.
    pub fingerprints: Option<View>,
    /// 16-bit weight of an fp32 parameter.
    pub weight_out: Option<View>,
    /// Scales of q8 moments: `exp_avg`, `exp_avg_sq`.
    pub scales: (Option<View>, Option<View>),
}

impl AdamTensor {
    /// Finds the layout and checks all sizes and dtypes.
    ///
    /// # Errors
    /// [`Error::Value`] naming what does not fit.
    pub fn new(
        param: View,
        grad: Option<View>,
        (exp_avg, exp_avg_sq): (View, View),
        beside: &Beside,
        key: u64,
    ) -> Result<Self> {
        let master = master_layout(param, beside)?;
        let moments = moments_layout(param, (exp_avg, exp_avg_sq), beside.scales, master)?;
        let tensor = Self { param, grad, exp_avg, exp_avg_sq, master, moments, key };
        if let Some(grad) = grad {
            tensor.check_grad(grad)?;
        }
        Ok(tensor)
    }

    fn check_grad(&self, grad: View) -> Result<()> {
        let plain = [self.param.dtype()];
        let dtypes = match self.master {
            MasterLayout::Plain16 => plain.as_slice(),
            _ => &[Dtype::Float32, Dtype::BFloat16, Dtype::Float16],
        };
        grad.expect("grad", dtypes, self.param.numel())
    }

    /// What the model computes with: the 16-bit copy of an fp32 master where there is one, else the
    /// parameter.
    #[must_use]
    pub fn weight(&self) -> View {
        match self.master {
            MasterLayout::Float32 { weight_out: Some(weight) } => weight,
            _ => self.param,
        }
    }

    /// The state of one of its chunks, as a tensor of its own, without gradient.
    #[must_use]
    pub fn chunk(&self, index: usize) -> Self {
        let begin = index * CHUNK_LEN;
        let state = self.map(|elements, view| {
            // What is padded to whole blocks is longer than the parameter.
            let item = |element: usize| (element / elements).min(view.numel());
            view.part(item(begin)..item(begin + CHUNK_LEN))
        });
        Self { grad: None, ..state }
    }
}

impl<V: Copy> AdamTensor<V> {
    /// The same layout of what `of` makes of each view that a step writes, one after the other; it
    /// is told how many elements of the parameter one of the view's stands for.
    pub(crate) fn map<U>(&self, mut of: impl FnMut(usize, V) -> U) -> AdamTensor<U> {
        let [param, exp_avg, exp_avg_sq] =
            [self.param, self.exp_avg, self.exp_avg_sq].map(|view| of(1, view));
        let master = match self.master {
            MasterLayout::Float32 { weight_out } => {
                MasterLayout::Float32 { weight_out: weight_out.map(|view| of(1, view)) }
            }
            MasterLayout::Split { trailing, fingerprints } => MasterLayout::Split {
                trailing: of(1, trailing),
                fingerprints: fingerprints.map(|view| of(CHUNK_LEN, view)),
            },
            MasterLayout::Shadowed { master } => MasterLayout::Shadowed { master: of(1, master) },
            MasterLayout::Plain16 => MasterLayout::Plain16,
        };
        let moments = match self.moments {
            MomentsLayout::Float32 => MomentsLayout::Float32,
            MomentsLayout::Stochastic => MomentsLayout::Stochastic,
            MomentsLayout::Nearest16 => MomentsLayout::Nearest16,
            MomentsLayout::Q8 { exp_avg_scales, exp_avg_sq_scales } => MomentsLayout::Q8 {
                exp_avg_scales: of(q8::GROUP, exp_avg_scales),
                exp_avg_sq_scales: of(q8::GROUP, exp_avg_sq_scales),
            },
        };
        AdamTensor { param, grad: self.grad, exp_avg, exp_avg_sq, master, moments, key: self.key }
    }

    /// Everything that a step writes, with names.
    pub fn written(&self) -> impl Iterator<Item = (&'static str, V)> {
        let (first, second) = match self.master {
            MasterLayout::Float32 { weight_out } => {
                (weight_out.map(|view| ("weight_out", view)), None)
            }
            MasterLayout::Split { trailing, fingerprints } => {
                (Some(("trailing", trailing)), fingerprints.map(|view| ("fingerprints", view)))
            }
            MasterLayout::Shadowed { master } => (Some(("master", master)), None),
            MasterLayout::Plain16 => (None, None),
        };
        let scales = match self.moments {
            MomentsLayout::Q8 { exp_avg_scales, exp_avg_sq_scales } => [
                Some(("exp_avg_scales", exp_avg_scales)),
                Some(("exp_avg_sq_scales", exp_avg_sq_scales)),
            ],
            _ => [None, None],
        };
        [
            Some(("param", self.param)),
            Some(("exp_avg", self.exp_avg)),
            Some(("exp_avg_sq", self.exp_avg_sq)),
        ]
        .into_iter()
        .chain([first, second])
        .chain(scales)
        .flatten()
    }
}

fn master_layout(param: View, beside: &Beside) -> Result<MasterLayout> {
    let numel = param.numel();
    param.expect("param", &[Dtype::Float32, Dtype::BFloat16, Dtype::Float16], numel)?;
    let given = [
        ("master", beside.master),
        ("trailing", beside.trailing),
        ("fingerprints", beside.fingerprints),
        ("weight_out", beside.weight_out),
    ];
    let refuse_others = |allowed: &[&str]| {
        given.iter().find(|(name, view)| view.is_some() && !allowed.contains(name)).map_or(
            Ok(()),
            |(name, _)| {
                Err(Error::value(format!(
                    "{name} is given for a `{}` parameter, expected none",
                    param.dtype()
                )))
            },
        )
    };
    match (param.dtype(), beside) {
        (Dtype::Float32, Beside { weight_out, .. }) => {
            refuse_others(&["weight_out"])?;
            if let Some(weight) = weight_out {
                weight.expect("weight_out", &[Dtype::BFloat16, Dtype::Float16], numel)?;
            }
            Ok(MasterLayout::Float32 { weight_out: *weight_out })
        }
        (Dtype::BFloat16, Beside { trailing: Some(trailing), fingerprints, .. }) => {
            refuse_others(&["trailing", "fingerprints"])?;
            trailing.expect("trailing", &[Dtype::Int16], numel)?;
            if let Some(fingerprints) = fingerprints {
                fingerprints.expect("fingerprints", &[Dtype::Int32], num_chunks(numel))?;
            }
            Ok(MasterLayout::Split { trailing: *trailing, fingerprints: *fingerprints })
        }
        (Dtype::BFloat16, Beside { fingerprints: Some(_), .. }) => {
            Err(Error::value("fingerprints are given without trailing bits, expected both"))
        }
        (Dtype::Float16, Beside { master: Some(master), .. }) => {
            refuse_others(&["master"])?;
            master.expect("master", &[Dtype::Float32], numel)?;
            Ok(MasterLayout::Shadowed { master: *master })
        }
        _ => {
            refuse_others(&[])?;
            Ok(MasterLayout::Plain16)
        }
    }
}

fn moments_layout(
    param: View,
    (exp_avg, exp_avg_sq): (View, View),
    scales: (Option<View>, Option<View>),
    master: MasterLayout,
) -> Result<MomentsLayout> {
    let is_plain = matches!(master, MasterLayout::Plain16);
    let (layout, numel) = match exp_avg.dtype() {
        Dtype::Uint8 => {
            let (Some(exp_avg_scales), Some(exp_avg_sq_scales)) = scales else {
                return Err(Error::value(
                    "exp_avg holds codes, expected exp_avg_scales and exp_avg_sq_scales beside them",
                ));
            };
            for (name, view) in
                [("exp_avg_scales", exp_avg_scales), ("exp_avg_sq_scales", exp_avg_sq_scales)]
            {
                view.expect(name, &[Dtype::BFloat16], q8::scales_len(param.numel()))?;
            }
            (MomentsLayout::Q8 { exp_avg_scales, exp_avg_sq_scales }, q8::codes_len(param.numel()))
        }
        dtype if is_plain && dtype == param.dtype() => (MomentsLayout::Nearest16, param.numel()),
        Dtype::BFloat16 => (MomentsLayout::Stochastic, param.numel()),
        _ => (MomentsLayout::Float32, param.numel()),
    };
    let dtype = match layout {
        MomentsLayout::Float32 => Dtype::Float32,
        MomentsLayout::Stochastic => Dtype::BFloat16,
        MomentsLayout::Nearest16 => param.dtype(),
        MomentsLayout::Q8 { .. } => Dtype::Uint8,
    };
    if is_plain && !matches!(layout, MomentsLayout::Float32 | MomentsLayout::Nearest16) {
        return Err(Error::value(format!(
            "exp_avg is `{}` for a `{}` parameter without a master, expected float32 or {1}\nhint: give trailing bits or a master",
            exp_avg.dtype(),
            param.dtype()
        )));
    }
    if !matches!(layout, MomentsLayout::Q8 { .. }) && (scales.0.is_some() || scales.1.is_some()) {
        return Err(Error::value(format!(
            "scales are given for `{}` moments, expected none",
            exp_avg.dtype()
        )));
    }
    exp_avg.expect("exp_avg", &[dtype], numel)?;
    exp_avg_sq.expect("exp_avg_sq", &[dtype], numel)?;
    Ok(layout)
}
