//! The step's kernel: every gradient, master and codec of moments against a float64 oracle, and bit
//! for bit across ISAs, splits, alignments, places and floating-point environments.

mod battery;

use std::ops::Range;

use battery::{
    Draw, Guarded, Held, Layout, MomentsKind, ParamKind, Spread, assert_follows, cases, counts,
    flushing_subnormals, hypers, scaled, widest,
};
use proptest::prelude::*;
use stepwell::{
    adam::{Hyper, Step, kernel::update},
    grads::norm::NORM_BLOCK,
    simd::{LANES, isa::Isa},
    state::{
        Master, Moments,
        chunk::CHUNK_LEN,
        dither::Dither,
        master::{Plain, Shadowed, WithWeightOut},
        moments::{Nearest, Stochastic},
        q8::{Coded, GROUP, Q8},
        split::{Fingerprint, Split},
    },
    stream::{
        BLOCK,
        cursor::{Cursor, publish},
        element::{Bf16, Dtype, Element, F16, Lane},
    },
};

/// Every master and every codec at least once: what the places of reading and writing are tested
/// with.
fn pairs() -> [Layout; 8] {
    use Dtype::{BFloat16, Float16, Float32};
    [
        Layout::new(ParamKind::Float32, MomentsKind::Float32, Float32),
        Layout::new(ParamKind::Float32WithBf16, MomentsKind::Q8, BFloat16),
        Layout::new(ParamKind::Float32WithF16, MomentsKind::Bf16, Float16),
        Layout::new(ParamKind::Split, MomentsKind::Float32, BFloat16),
        Layout::new(ParamKind::Split, MomentsKind::Q8, BFloat16),
        Layout::new(ParamKind::Shadowed, MomentsKind::Bf16, Float16),
        Layout::new(ParamKind::PlainBf16, MomentsKind::Nearest16, BFloat16),
        Layout::new(ParamKind::PlainF16, MomentsKind::Nearest16, Float16),
    ]
}

/// One call of the kernel on the elements `range` of one chunk of [`pairs`], from one tensor's
/// memory to another's or in place.
struct Call<'a> {
    isa: Isa,
    step: Step,
    from: Option<&'a Held>,
    range: Range<usize>,
}

impl Call<'_> {
    fn cursor<'b, T: Lane>(
        &'b self,
        of: impl Fn(&'b Held) -> Option<&'b Guarded>,
        to: &'b mut Guarded,
    ) -> Cursor<'b, T> {
        let to = &mut to.slice_mut::<T>()[self.range.clone()];
        match self.from {
            None => Cursor::in_place(to),
            Some(from) => {
                let from = of(from).expect("the layout has it").slice::<T>();
                Cursor::out_of_place(&from[self.range.clone()], to)
            }
        }
    }

    /// As [`Call::cursor`], for what not every layout has.
    fn beside<'b, T: Lane>(
        &'b self,
        of: impl Fn(&'b Held) -> &'b Option<Guarded>,
        to: &'b mut Option<Guarded>,
    ) -> Cursor<'b, T> {
        self.cursor(move |from| of(from).as_ref(), to.as_mut().expect("the layout has it"))
    }

    fn param<'b, T: Lane>(&'b self, to: &'b mut Guarded) -> Cursor<'b, T> {
        self.cursor(|from| Some(&from.param), to)
    }

    fn run(&self, to: &mut Held) {
        let Held { layout, key, param, grad, master, trailing, fingerprints, weight_out, .. } = to;
        let moments = HeldMoments {
            key: *key,
            exp_avg: &mut to.exp_avg,
            exp_avg_sq: &mut to.exp_avg_sq,
            exp_avg_scales: &mut to.exp_avg_scales,
            exp_avg_sq_scales: &mut to.exp_avg_sq_scales,
        };
        match (layout.param, layout.moments) {
            (ParamKind::Float32, _) => {
                self.nearest::<_, f32, f32>(grad, Plain(self.param::<f32>(param)), moments)
            }
            (ParamKind::Float32WithBf16, _) => {
                let weight = self.beside::<Bf16>(|from| &from.weight_out, weight_out);
                self.q8(grad, WithWeightOut::new(self.param(param), weight), moments);
            }
            (ParamKind::Float32WithF16, _) => {
                let weight = self.beside::<F16>(|from| &from.weight_out, weight_out);
                self.stochastic(grad, WithWeightOut::new(self.param(param), weight), moments);
            }
            (ParamKind::Split, held_as) => {
                // The pieces of a chunk share its fingerprint: `settle` is called before the first,
                // `take_fingerprints` after the last.
                let void = fingerprints.as_ref().expect("the layout has it").slice::<i32>().first()
                    == Some(&0);
                let low = self.beside::<i16>(|from| &from.trailing, trailing);
                let master = Split::new(self.param(param), low, void);
                if held_as == MomentsKind::Q8 {
                    self.q8(grad, master, moments);
                } else {
                    self.nearest::<_, Bf16, f32>(grad, master, moments);
                }
            }
            (ParamKind::Shadowed, _) => {
                let full = self.beside::<f32>(|from| &from.master, master);
                self.stochastic(grad, Shadowed::<F16>::new(full, self.param(param)), moments);
            }
            (ParamKind::PlainBf16, _) => {
                self.nearest::<_, Bf16, Bf16>(grad, Plain(self.param::<Bf16>(param)), moments)
            }
            (ParamKind::PlainF16, _) => {
                self.nearest::<_, F16, F16>(grad, Plain(self.param::<F16>(param)), moments)
            }
        }
        publish();
    }

    fn update<const Q: usize, G: Element>(
        &self,
        grad: &Guarded,
        master: impl Master,
        moments: impl Moments<Q>,
        key: u64,
    ) {
        let dither = Dither::new(key, self.step.count, self.range.start as u64);
        update(
            self.isa,
            &self.step,
            &grad.slice::<G>()[self.range.clone()],
            master,
            moments,
            dither,
        );
    }

    fn nearest<P: Master, G: Element, T: Element>(
        &self,
        grad: &Guarded,
        master: P,
        moments: HeldMoments<'_>,
    ) {
        let exp_avg = self.cursor::<T>(|from| Some(&from.exp_avg), moments.exp_avg);
        let exp_avg_sq = self.cursor::<T>(|from| Some(&from.exp_avg_sq), moments.exp_avg_sq);
        self.update::<_, G>(grad, master, Nearest::new(exp_avg, exp_avg_sq), moments.key);
    }

    fn stochastic(&self, grad: &Guarded, master: impl Master, moments: HeldMoments<'_>) {
        let exp_avg = self.cursor::<Bf16>(|from| Some(&from.exp_avg), moments.exp_avg);
        let exp_avg_sq = self.cursor::<Bf16>(|from| Some(&from.exp_avg_sq), moments.exp_avg_sq);
        self.update::<_, F16>(grad, master, Stochastic::new(exp_avg, exp_avg_sq), moments.key);
    }

    fn q8(&self, grad: &Guarded, master: impl Master, moments: HeldMoments<'_>) {
        let of = self.from.map(|from| {
            [(&from.exp_avg, &from.exp_avg_scales), (&from.exp_avg_sq, &from.exp_avg_sq_scales)]
        });
        let q8 = Q8 {
            exp_avg: self.coded(of.map(|of| of[0]), moments.exp_avg, moments.exp_avg_scales),
            exp_avg_sq: self.coded(
                of.map(|of| of[1]),
                moments.exp_avg_sq,
                moments.exp_avg_sq_scales,
            ),
        };
        self.update::<_, Bf16>(grad, master, q8, moments.key);
    }

    fn coded<'b>(
        &self,
        from: Option<(&'b Guarded, &'b Option<Guarded>)>,
        codes: &'b mut Guarded,
        scales: &'b mut Option<Guarded>,
    ) -> Coded<'b> {
        let end = self.range.end.next_multiple_of(BLOCK);
        let (words, groups) =
            (self.range.start / 4..end / 4, self.range.start / GROUP..end / GROUP);
        let codes = &mut codes.words_mut()[words.clone()];
        let scales =
            &mut scales.as_mut().expect("q8 has scales").slice_mut::<Bf16>()[groups.clone()];
        match from {
            None => Coded { codes: Cursor::in_place(codes), scales: Cursor::in_place(scales) },
            Some((from, from_scales)) => {
                let from_scales = from_scales.as_ref().expect("q8 has scales").slice::<Bf16>();
                Coded {
                    codes: Cursor::out_of_place(&from.words()[words], codes),
                    scales: Cursor::out_of_place(&from_scales[groups], scales),
                }
            }
        }
    }
}

struct HeldMoments<'a> {
    key: u64,
    exp_avg: &'a mut Guarded,
    exp_avg_sq: &'a mut Guarded,
    exp_avg_scales: &'a mut Option<Guarded>,
    exp_avg_sq_scales: &'a mut Option<Guarded>,
}

/// Marks the trailing bits as belonging to the parameter, or as void where they do not.
fn settle(held: &mut Held, isa: Isa) {
    if let Some(fingerprints) = &mut held.fingerprints {
        let now = isa.run(Fingerprint(held.param.slice())).cast_signed();
        for fingerprint in fingerprints.slice_mut::<i32>() {
            *fingerprint = if *fingerprint == now { now } else { 0 };
        }
    }
}

fn take_fingerprints(held: &mut Held, isa: Isa) {
    if let Some(fingerprints) = &mut held.fingerprints {
        let now = isa.run(Fingerprint(held.param.slice())).cast_signed();
        fingerprints.slice_mut::<i32>().fill(now);
    }
}

/// Sizes around everything that a kernel counts by.
fn sizes() -> impl Strategy<Value = usize> {
    let around = |at: usize| at - 1..=at + 1;
    prop_oneof![
        8 => 0_usize..=130,
        1 => around(LANES),
        1 => around(BLOCK),
        1 => around(2 * BLOCK),
        1 => around(1024 + BLOCK), // what is fetched ahead
    ]
}

proptest! {
    #![proptest_config(cases(256))]

    /// Also that every ISA gives the same bits, wherever the memory lies, and touches nothing
    /// beside it.
    #[test]
    fn every_kernel_follows_the_oracle(
        numel in sizes(),
        offset in 0_usize..64,
        spread in Spread::any(),
        hyper in hypers(),
        count in counts(),
        seed: u64,
    ) {
        for layout in Layout::all() {
            let mut before = Held::random(layout, numel, 0, spread, seed);
            let mut first: Option<Held> = None;
            for isa in Isa::available() {
                let mut after = before.moved(offset);
                after.step(isa, count, &hyper);
                after.assert_guards();
                match &mut first {
                    None => {
                        assert_follows(&mut before, &mut after, isa, count, &hyper);
                        first = Some(after);
                    }
                    Some(first) => {
                        after.assert_same(
                            first,
                            &format!("{layout:?} on {} against the baseline", isa.name()),
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn splits_at_blocks_do_not_show(
        numel in 1_usize..600,
        pieces in prop::collection::vec(1_usize..4, 1..12),
        hyper in hypers(),
        count in counts(),
        seed: u64,
    ) {
        let mut ends: Vec<usize> = pieces
            .iter()
            .scan(0, |end, piece| {
                *end += piece * BLOCK;
                Some((*end).min(numel))
            })
            .collect();
        ends.push(numel);
        ends.dedup();
        for layout in pairs() {
            for isa in Isa::available() {
                let before = Held::random(layout, numel, 0, Spread::Special, seed);
                let (mut whole, mut split) = (before.moved(0), before.moved(3));
                whole.step(isa, count, &hyper);
                settle(&mut split, isa);
                let mut begin = 0;
                for &end in &ends {
                    Call { isa, step: Step::new(&hyper, count), from: None, range: begin..end }
                        .run(&mut split);
                    begin = end;
                }
                take_fingerprints(&mut split, isa);
                split.assert_same(&mut whole, &format!("{layout:?} on {} in pieces", isa.name()));
            }
        }
    }

    /// Streaming stores where the destination is aligned to a line, ordinary ones where it is not.
    #[test]
    fn out_of_place_gives_the_bits_of_in_place(
        numel in sizes(),
        from_offset in 0_usize..64,
        to_offset in prop_oneof![Just(0_usize), 0_usize..64],
        hyper in hypers(),
        count in counts(),
        seed: u64,
    ) {
        for layout in pairs() {
            for isa in Isa::available() {
                let mut from = Held::random(layout, numel, from_offset, Spread::Special, seed);
                settle(&mut from, isa);
                let before = from.moved(0);
                let mut in_place = from.moved(0);
                in_place.step(isa, count, &hyper);

                let mut to = Held::zeros(layout, numel, to_offset);
                to.grad.payload_mut().copy_from_slice(from.grad.payload());
                if let (Some(fingerprints), Some(of)) = (&mut to.fingerprints, &from.fingerprints) {
                    fingerprints.payload_mut().copy_from_slice(of.payload());
                }
                Call { isa, step: Step::new(&hyper, count), from: Some(&from), range: 0..numel }
                    .run(&mut to);
                take_fingerprints(&mut to, isa);
                to.assert_guards();
                to.assert_same(
                    &mut in_place,
                    &format!("{layout:?} on {} out of place", isa.name()),
                );
                from.assert_untouched(&before, "the source");
            }
        }
    }

    #[test]
    fn flush_to_zero_on_the_calling_thread_does_not_show(
        numel in 1_usize..200,
        hyper in hypers(),
        count in counts(),
        seed: u64,
    ) {
        for layout in Layout::states() {
            for isa in Isa::available() {
                let mut draw = Draw::new(seed);
                let mut before = Held::zeros(layout, numel, 0);
                // Subnormal wherever a value can be: what flushing would change.
                let mut tiny = || {
                    (0..numel).map(|_| draw.value(Spread::Ordinary) * 1e-38).collect::<Vec<f32>>()
                };
                let (master, exp_avg) = (tiny(), tiny());
                let exp_avg_sq: Vec<f32> = tiny().into_iter().map(f32::abs).collect();
                let grad = tiny();
                before.write(&master, &exp_avg, &exp_avg_sq);
                before.set_grad(|index| grad[index]);
                let (mut plain, mut flushed) = (before.moved(0), before.moved(0));
                plain.step(isa, count, &hyper);
                flushing_subnormals(|| flushed.step(isa, count, &hyper));
                flushed.assert_same(
                    &mut plain,
                    &format!("{layout:?} on {} with flush-to-zero", isa.name()),
                );
            }
        }
    }
}

/// Every size up to 130 and every offset, with the specials everywhere.
#[test]
fn every_size_at_every_offset() {
    for layout in Layout::all() {
        for numel in (0..=130).step_by(131 / scaled(131)) {
            let mut before = Held::random(layout, numel, 0, Spread::Special, numel as u64);
            let hyper = Hyper { weight_decay: 0.1, ..Hyper::default() };
            let mut expected = before.moved(0);
            expected.step(Isa::SCALAR, 3, &hyper);
            assert_follows(&mut before, &mut expected, Isa::SCALAR, 3, &hyper);
            for offset in [numel % 64, (numel * 29 + 1) % 64] {
                let mut after = before.moved(offset);
                after.step(widest(), 3, &hyper);
                after.assert_guards();
                after.assert_same(
                    &mut expected,
                    &format!("{layout:?}, {numel} elements at {offset}"),
                );
            }
        }
    }
}

/// Around a summation block and a whole chunk: the index within the parameter is what the rounding
/// draws from.
#[test]
fn large_sizes_follow_the_oracle() {
    for layout in Layout::states() {
        for numel in [NORM_BLOCK - 1, NORM_BLOCK + 1, CHUNK_LEN - 1, CHUNK_LEN] {
            if battery::is_hurried() && numel > NORM_BLOCK + 1 {
                continue;
            }
            let mut before = Held::random(layout, numel, 0, Spread::Ordinary, 5);
            let hyper = Hyper { weight_decay: 0.01, ..Hyper::default() };
            let mut first: Option<Held> = None;
            for isa in Isa::available() {
                let mut after = before.moved(1);
                after.step(isa, 2, &hyper);
                match &mut first {
                    None => {
                        assert_follows(&mut before, &mut after, isa, 2, &hyper);
                        first = Some(after);
                    }
                    Some(first) => after.assert_same(
                        first,
                        &format!("{layout:?}, {numel} elements on {}", isa.name()),
                    ),
                }
            }
        }
    }
}

/// A bf16 parameter with trailing bits is an fp32 parameter: bit for bit after 1,000 steps, when
/// the gradients are equal.
#[test]
fn a_split_master_steps_as_fp32() {
    const NUMEL: usize = 257;
    for isa in Isa::available() {
        let mut draw = Draw::new(11);
        let master = draw.values(Spread::Ordinary, NUMEL);
        let layout = |param| Layout::new(param, MomentsKind::Float32, Dtype::BFloat16);
        let mut full = Held::zeros(layout(ParamKind::Float32), NUMEL, 0);
        let mut split = Held::zeros(layout(ParamKind::Split), NUMEL, 0);
        for held in [&mut full, &mut split] {
            held.write_master(&master);
        }
        let hyper = Hyper { lr: 1e-3, weight_decay: 0.1, ..Hyper::default() };
        for count in 1..=1000 {
            let grads = draw.values(Spread::Ordinary, NUMEL);
            for held in [&mut full, &mut split] {
                held.set_grad(|index| grads[index]);
                held.step(isa, count, &hyper);
            }
        }
        assert_eq!(full.read_master(), split.read_master(), "{}", isa.name());
        assert_ne!(full.read_master(), master, "nothing moved");
        assert_eq!(full.read_moments(), split.read_moments(), "{}", isa.name());
    }
}
