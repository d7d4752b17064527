//! A parameter with its gradient and state, in every layout, as a test holds it.

use std::fmt;

use stepwell::{
    adam::{
        Hyper, batch,
        exchange::{self, StateViews},
        tensor::AdamTensor,
    },
    host::pool::Pool,
    simd::isa::Isa,
    state::{chunk::num_chunks, q8},
    stream::{
        element::{Bf16, Dtype, F16},
        view::View,
    },
};

use super::{Draw, Guarded, Spread, pool};

/// A parameter and what is its master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParamKind {
    Float32,
    Float32WithBf16,
    Float32WithF16,
    Split,
    Shadowed,
    PlainBf16,
    PlainF16,
}

/// How moments are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MomentsKind {
    Float32,
    Bf16,
    Q8,
    /// The dtype of a plain 16-bit parameter.
    Nearest16,
}

/// One combination that a step supports.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) param: ParamKind,
    pub(crate) moments: MomentsKind,
    pub(crate) grad: Dtype,
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} with {:?} moments and a {} gradient", self.param, self.moments, self.grad)
    }
}

impl Layout {
    pub(crate) fn new(param: ParamKind, moments: MomentsKind, grad: Dtype) -> Self {
        Self { param, moments, grad }
    }

    /// Every combination that there is.
    pub(crate) fn all() -> Vec<Self> {
        use MomentsKind::{Bf16, Float32, Nearest16, Q8};
        let mut all = Vec::new();
        let with_master = [
            ParamKind::Float32,
            ParamKind::Float32WithBf16,
            ParamKind::Float32WithF16,
            ParamKind::Split,
            ParamKind::Shadowed,
        ];
        for param in with_master {
            for moments in [Float32, Bf16, Q8] {
                for grad in [Dtype::Float32, Dtype::BFloat16, Dtype::Float16] {
                    all.push(Self { param, moments, grad });
                }
            }
        }
        for (param, grad) in
            [(ParamKind::PlainBf16, Dtype::BFloat16), (ParamKind::PlainF16, Dtype::Float16)]
        {
            for moments in [Float32, Nearest16] {
                all.push(Self { param, moments, grad });
            }
        }
        all
    }

    /// Every master and every codec of moments, with one dtype of gradient each.
    pub(crate) fn states() -> Vec<Self> {
        Self::all()
            .into_iter()
            .filter(|layout| match layout.param {
                ParamKind::Float32 => layout.grad == Dtype::Float32,
                ParamKind::Shadowed | ParamKind::Float32WithF16 => layout.grad == Dtype::Float16,
                ParamKind::Split | ParamKind::Float32WithBf16 => layout.grad == Dtype::BFloat16,
                ParamKind::PlainBf16 | ParamKind::PlainF16 => true,
            })
            .collect()
    }

    fn param_dtype(self) -> Dtype {
        match self.param {
            ParamKind::Float32 | ParamKind::Float32WithBf16 | ParamKind::Float32WithF16 => {
                Dtype::Float32
            }
            ParamKind::Split | ParamKind::PlainBf16 => Dtype::BFloat16,
            ParamKind::Shadowed | ParamKind::PlainF16 => Dtype::Float16,
        }
    }

    fn moments_dtype(self) -> Dtype {
        match self.moments {
            MomentsKind::Float32 => Dtype::Float32,
            MomentsKind::Bf16 => Dtype::BFloat16,
            MomentsKind::Q8 => Dtype::Uint8,
            MomentsKind::Nearest16 => self.param_dtype(),
        }
    }
}

/// A parameter of one layout. What the layout does not have is `None`.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) layout: Layout,
    pub(crate) numel: usize,
    pub(crate) key: u64,
    pub(crate) param: Guarded,
    pub(crate) grad: Guarded,
    pub(crate) exp_avg: Guarded,
    pub(crate) exp_avg_sq: Guarded,
    pub(crate) exp_avg_scales: Option<Guarded>,
    pub(crate) exp_avg_sq_scales: Option<Guarded>,
    pub(crate) master: Option<Guarded>,
    pub(crate) trailing: Option<Guarded>,
    pub(crate) fingerprints: Option<Guarded>,
    pub(crate) weight_out: Option<Guarded>,
}

/// Equal bits, or two NaNs.
pub(crate) fn is_same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

impl Held {
    /// All zeros: a fresh state.
    pub(crate) fn zeros(layout: Layout, numel: usize, offset: usize) -> Self {
        let moment = || {
            let len = if layout.moments == MomentsKind::Q8 { q8::codes_len(numel) } else { numel };
            Guarded::zeros(layout.moments_dtype(), len, offset)
        };
        let scales = || {
            let is_q8 = layout.moments == MomentsKind::Q8;
            is_q8.then(|| Guarded::zeros(Dtype::BFloat16, q8::scales_len(numel), offset))
        };
        let beside = |param: ParamKind, dtype, len| {
            (layout.param == param).then(|| Guarded::zeros(dtype, len, offset))
        };
        Self {
            layout,
            numel,
            key: 7,
            param: Guarded::zeros(layout.param_dtype(), numel, offset),
            grad: Guarded::zeros(layout.grad, numel, offset),
            exp_avg: moment(),
            exp_avg_sq: moment(),
            exp_avg_scales: scales(),
            exp_avg_sq_scales: scales(),
            master: beside(ParamKind::Shadowed, Dtype::Float32, numel),
            trailing: beside(ParamKind::Split, Dtype::Int16, numel),
            fingerprints: beside(ParamKind::Split, Dtype::Int32, num_chunks(numel)),
            weight_out: beside(ParamKind::Float32WithBf16, Dtype::BFloat16, numel)
                .or_else(|| beside(ParamKind::Float32WithF16, Dtype::Float16, numel)),
        }
    }

    /// A state as some steps leave it, with a gradient; now and then with a parameter that the
    /// program has written.
    pub(crate) fn random(
        layout: Layout,
        numel: usize,
        offset: usize,
        spread: Spread,
        seed: u64,
    ) -> Self {
        let mut draw = Draw::new(seed);
        let mut held = Self::zeros(layout, numel, offset);
        let master = draw.values(spread, numel);
        let exp_avg = draw.values(spread, numel);
        let exp_avg_sq: Vec<f32> = draw.values(spread, numel).into_iter().map(f32::abs).collect();
        held.write(&master, &exp_avg, &exp_avg_sq);
        for (index, grad) in draw.values(spread, numel).into_iter().enumerate() {
            held.grad.set_value(index, grad);
        }
        if draw.below(4) == 0 && numel > 0 {
            let (index, value) = (draw.below(numel), draw.value(spread));
            held.param.set_value(index, value);
        }
        held
    }

    /// The same elements elsewhere.
    pub(crate) fn moved(&self, offset: usize) -> Self {
        let moved = |buffer: &Option<Guarded>| buffer.as_ref().map(|buffer| buffer.moved(offset));
        Self {
            layout: self.layout,
            numel: self.numel,
            key: self.key,
            param: self.param.moved(offset),
            grad: self.grad.moved(offset),
            exp_avg: self.exp_avg.moved(offset),
            exp_avg_sq: self.exp_avg_sq.moved(offset),
            exp_avg_scales: moved(&self.exp_avg_scales),
            exp_avg_sq_scales: moved(&self.exp_avg_sq_scales),
            master: moved(&self.master),
            trailing: moved(&self.trailing),
            fingerprints: moved(&self.fingerprints),
            weight_out: moved(&self.weight_out),
        }
    }

    pub(crate) fn set_grad(&mut self, value: impl Fn(usize) -> f32) {
        for index in 0..self.numel {
            self.grad.set_value(index, value(index));
        }
    }

    /// The tensor as a step takes it.
    pub(crate) fn tensor(&mut self) -> AdamTensor {
        let names = if self.layout.moments == MomentsKind::Q8 {
            ["exp_avg_codes", "exp_avg_sq_codes"]
        } else {
            ["exp_avg", "exp_avg_sq"]
        };
        let beside = [
            ("exp_avg_scales", &mut self.exp_avg_scales),
            ("exp_avg_sq_scales", &mut self.exp_avg_sq_scales),
            ("master", &mut self.master),
            ("trailing", &mut self.trailing),
            ("fingerprints", &mut self.fingerprints),
        ];
        let mut parts: Vec<(&str, View)> = beside
            .into_iter()
            .filter_map(|(name, buffer)| buffer.as_mut().map(|buffer| (name, buffer.view())))
            .collect();
        parts.extend([(names[0], self.exp_avg.view()), (names[1], self.exp_avg_sq.view())]);
        let weight_out = self.weight_out.as_mut().map(Guarded::view);
        AdamTensor::new(self.param.view(), &parts, Some(self.grad.view()), weight_out, self.key)
            .expect("a valid tensor")
    }

    /// One update in place.
    pub(crate) fn step(&mut self, isa: Isa, count: u64, hyper: &Hyper) {
        self.step_on(pool(), isa, count, hyper);
    }

    /// One update in place, on a pool.
    pub(crate) fn step_on(&mut self, pool: &Pool, isa: Isa, count: u64, hyper: &Hyper) {
        let tensor = self.tensor();
        // SAFETY: the views are of this value's buffers, which nothing else uses.
        unsafe { batch::step(pool, isa, &[tensor], &[count], hyper) }.expect("a valid step");
    }

    /// Encodes a state.
    pub(crate) fn write(&mut self, master: &[f32], exp_avg: &[f32], exp_avg_sq: &[f32]) {
        self.write_master(master);
        self.write_moments(exp_avg, exp_avg_sq, 0);
    }

    pub(crate) fn write_master(&mut self, master: &[f32]) {
        let (tensor, mut master) = (self.tensor(), lent(master));
        let from = StateViews { master: Some(master.view()), moments: None };
        // SAFETY: as in `step`; `master` is this function's.
        unsafe { exchange::write_state(pool(), widest(), &tensor, 0, from) }
            .expect("a valid write");
    }

    /// `count` seeds the rounding.
    pub(crate) fn write_moments(&mut self, exp_avg: &[f32], exp_avg_sq: &[f32], count: u64) {
        self.write_moments_on(widest(), exp_avg, exp_avg_sq, count);
    }

    pub(crate) fn write_moments_on(
        &mut self,
        isa: Isa,
        exp_avg: &[f32],
        exp_avg_sq: &[f32],
        count: u64,
    ) {
        let (tensor, mut exp_avg, mut exp_avg_sq) =
            (self.tensor(), lent(exp_avg), lent(exp_avg_sq));
        let from = StateViews { master: None, moments: Some((exp_avg.view(), exp_avg_sq.view())) };
        // SAFETY: as in `write_master`.
        unsafe { exchange::write_state(pool(), isa, &tensor, count, from) }.expect("a valid write");
    }

    /// The master that the next step starts from.
    pub(crate) fn read_master(&mut self) -> Vec<f32> {
        let (tensor, mut master) = (self.tensor(), Guarded::zeros(Dtype::Float32, self.numel, 0));
        let to = StateViews { master: Some(master.view()), moments: None };
        // SAFETY: as in `write_master`.
        unsafe { exchange::read_state(pool(), widest(), &tensor, to) }.expect("a valid read");
        master.values()
    }

    /// `(exp_avg, exp_avg_sq)`.
    pub(crate) fn read_moments(&mut self) -> (Vec<f32>, Vec<f32>) {
        let tensor = self.tensor();
        let [mut exp_avg, mut exp_avg_sq] =
            [(); 2].map(|()| Guarded::zeros(Dtype::Float32, self.numel, 0));
        let to = StateViews { master: None, moments: Some((exp_avg.view(), exp_avg_sq.view())) };
        // SAFETY: as in `write_master`.
        unsafe { exchange::read_state(pool(), widest(), &tensor, to) }.expect("a valid read");
        (exp_avg.values(), exp_avg_sq.values())
    }

    /// Every buffer that the layout has.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = (&'static str, &Guarded)> {
        [
            ("param", Some(&self.param)),
            ("grad", Some(&self.grad)),
            ("exp_avg", Some(&self.exp_avg)),
            ("exp_avg_sq", Some(&self.exp_avg_sq)),
            ("exp_avg_scales", self.exp_avg_scales.as_ref()),
            ("exp_avg_sq_scales", self.exp_avg_sq_scales.as_ref()),
            ("master", self.master.as_ref()),
            ("trailing", self.trailing.as_ref()),
            ("fingerprints", self.fingerprints.as_ref()),
            ("weight_out", self.weight_out.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, buffer)| Some((name, buffer?)))
    }

    pub(crate) fn assert_guards(&self) {
        self.buffers().for_each(|(name, buffer)| buffer.assert_guards(name));
    }

    /// Fails where a byte differs.
    pub(crate) fn assert_untouched(&self, before: &Self, what: &str) {
        for ((name, ours), (_, theirs)) in self.buffers().zip(before.buffers()) {
            assert!(ours.payload() == theirs.payload(), "{what}: {name} was changed");
        }
    }

    /// Fails where a bit differs, but for the bits of NaNs.
    pub(crate) fn assert_same(&mut self, other: &mut Self, what: &str) {
        let is_q8 = self.layout.moments == MomentsKind::Q8;
        for ((name, ours), (_, theirs)) in self.buffers().zip(other.buffers()) {
            if ours.payload() == theirs.payload() {
                continue;
            }
            match ours.dtype() {
                Dtype::Float32 | Dtype::BFloat16 | Dtype::Float16 => {
                    let differs =
                        |index: &usize| !is_same(ours.value(*index), theirs.value(*index));
                    if let Some(index) = (0..ours.numel()).find(differs) {
                        let (ours, theirs) = (ours.value(index), theirs.value(index));
                        panic!("{what}: {name}[{index}] is {ours:e} against {theirs:e}");
                    }
                }
                // The codes of a group whose scale is a NaN mean nothing: decoded below.
                Dtype::Uint8 => assert!(is_q8),
                _ => panic!("{what}: {name} differs"),
            }
        }
        let codes_differ = self.exp_avg.payload() != other.exp_avg.payload()
            || self.exp_avg_sq.payload() != other.exp_avg_sq.payload();
        if is_q8 && codes_differ {
            let (ours, theirs) = (self.read_moments(), other.read_moments());
            for (name, ours, theirs) in
                [("exp_avg", ours.0, theirs.0), ("exp_avg_sq", ours.1, theirs.1)]
            {
                for (index, (ours, theirs)) in ours.into_iter().zip(theirs).enumerate() {
                    assert!(
                        is_same(ours, theirs),
                        "{what}: {name}[{index}] is {ours:e} against {theirs:e}"
                    );
                }
            }
        }
    }
}

fn lent(values: &[f32]) -> Guarded {
    let mut lent = Guarded::zeros(Dtype::Float32, values.len(), 0);
    lent.slice_mut::<f32>().copy_from_slice(values);
    lent
}

/// The widest ISA of this machine, which the tests' own reads and writes use.
pub(crate) fn widest() -> Isa {
    Isa::available().last().expect("scalar is always there")
}
