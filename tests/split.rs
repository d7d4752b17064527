//! 16-bit parameters with an exact master: the split in halves, and what happens when the program
//! writes the parameter.

mod battery;

use battery::{
    Draw, Held, Layout, MomentsKind, ParamKind, SPECIALS, Spread, cases, is_hurried, is_same, pool,
    widest,
};
use proptest::prelude::*;
use stepwell::{
    adam::{Hyper, batch::step, exchange::take_fingerprints},
    simd::{
        LANES, Simd,
        isa::{Isa, Kernel},
    },
    state::{
        chunk::CHUNK_LEN,
        split::{Fingerprint, join, split},
    },
    stream::element::{Bf16, Dtype, F16},
};

/// Splits and joins the bits `begin + i * stride` for i in 0..count; the first that do not come
/// back.
struct RoundTrip {
    begin: u32,
    stride: u32,
    count: u64,
}

impl Kernel for RoundTrip {
    type Output = Option<u32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Option<u32> {
        let lane: [u32; LANES] =
            std::array::from_fn(|lane| self.begin.wrapping_add(lane as u32 * self.stride));
        // SAFETY: `lane` holds LANES words.
        let mut bits = unsafe { simd.load_u32(lane.as_ptr()) };
        for _ in 0..self.count.div_ceil(LANES as u64) {
            let ([high], [low]) = split(simd, [simd.of_bits(bits)]);
            let back = simd.bits(join(simd, high, low, simd.splat_u(u32::MAX)));
            let is_nan = simd.gt_u(simd.magnitude(simd.of_bits(bits)), simd.splat_u(0x7f80_0000));
            let expected = simd.select(is_nan, simd.splat_u(0x7fc0_0000), bits);
            let wide = simd.shr::<16>(simd.or(high, low));
            let wrong = simd.or(simd.xor(back, expected), wide);
            if simd.max_lane(wrong) != 0 {
                let mut at = [0; LANES];
                // SAFETY: `at` holds LANES words.
                unsafe { simd.store_u32(at.as_mut_ptr(), bits) };
                return Some(at[0]);
            }
            bits = simd.add_u(bits, simd.splat_u(self.stride.wrapping_mul(LANES as u32)));
        }
        None
    }
}

/// A bijection of all 2^32 patterns, but for the NaNs, which become one.
#[test]
fn every_fp32_number_is_restored() {
    for isa in Isa::available() {
        let is_full = isa == widest() && !is_hurried();
        let stride = if is_full { 1 } else { 257 };
        let count = (1_u64 << 32) / u64::from(stride);
        let wrong = isa.run(RoundTrip { begin: 0, stride, count });
        assert_eq!(wrong, None, "near {wrong:#x?} on {}", isa.name());
    }
}

/// The high half is bf16's nearest but on exact ties, where it is the one away from zero.
#[test]
fn the_high_half_is_the_rounded_weight() {
    let sweep = (0..=u32::MAX).step_by(65_521).chain((0..=u32::MAX).step_by(0x8000));
    let values: Vec<f32> = SPECIALS.into_iter().chain(sweep).map(f32::from_bits).collect();
    let mut held = split_of(values.len());
    held.write_master(&values);
    for (index, value) in values.iter().enumerate().filter(|(_, value)| !value.is_nan()) {
        let high = held.param.slice::<Bf16>()[index].0;
        let is_tie = value.to_bits() & 0xffff == 0x8000;
        let nearest = half::bf16::from_f32(*value).to_bits();
        let away = (value.to_bits() >> 16) as u16 + 1;
        assert_eq!(high, if is_tie { away } else { nearest }, "{value:e}");
    }
}

fn split_of(numel: usize) -> Held {
    Held::zeros(Layout::new(ParamKind::Split, MomentsKind::Float32, Dtype::BFloat16), numel, 0)
}

fn bf16s(seed: u64, len: usize) -> Vec<Bf16> {
    let mut draw = Draw::new(seed);
    (0..len).map(|_| Bf16(draw.bits() as u16)).collect()
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn a_fingerprint_depends_on_neither_isa_nor_alignment(
        len in 0_usize..700,
        offset in 0_usize..40,
        seed: u64,
    ) {
        let values = bf16s(seed, offset + len);
        let aligned = values[offset..].to_vec();
        let expected = Isa::SCALAR.run(Fingerprint(&aligned));
        prop_assert_ne!(expected, 0);
        for isa in Isa::available() {
            prop_assert_eq!(isa.run(Fingerprint(&values[offset..])), expected, "{}", isa.name());
        }
    }

    #[test]
    fn a_fingerprint_sees_swaps_and_lengths(
        len in 2_usize..700,
        seed: u64,
        from in 0_usize..700,
        to in 0_usize..700,
    ) {
        let isa = widest();
        let mut values = bf16s(seed, len);
        let before = isa.run(Fingerprint(&values));
        prop_assert_ne!(isa.run(Fingerprint(&values[..len - 1])), before);
        let (from, to) = (from % len, to % len);
        if values[from] != values[to] {
            values.swap(from, to);
            prop_assert_ne!(isa.run(Fingerprint(&values)), before, "{} and {} swapped", from, to);
        }
    }

    /// What the program wrote wins, for the whole chunk. What it did not write stays exact. A step
    /// goes on from there, and only then do the trailing bits count again.
    #[test]
    fn what_the_program_writes_wins(
        numel in prop_oneof![1_usize..200, CHUNK_LEN + 1..CHUNK_LEN + 100],
        writes in prop::collection::vec((any::<prop::sample::Index>(), any::<u16>()), 1..4),
        spread in prop_oneof![Just(Spread::Ordinary), Just(Spread::Special)],
        seed: u64,
    ) {
        let isa = widest();
        let mut held = Held::random(
            Layout::new(ParamKind::Split, MomentsKind::Float32, Dtype::BFloat16),
            numel,
            1,
            spread,
            seed,
        );
        let hyper = Hyper::default();
        held.step(isa, 1, &hyper);
        let exact = held.read_master();
        let before = held.param.slice::<Bf16>().to_vec();
        for (index, bits) in &writes {
            held.param.slice_mut::<Bf16>()[index.index(numel)] = Bf16(*bits);
        }
        let chunk = |index: usize| index / CHUNK_LEN;
        let written: Vec<usize> = (0..numel)
            .filter(|&index| held.param.slice::<Bf16>()[index] != before[index])
            .map(chunk)
            .collect();
        let expected: Vec<f32> = (0..numel)
            .map(|index| {
                if written.contains(&chunk(index)) { held.param.value(index) } else { exact[index] }
            })
            .collect();

        // Reading does not make stale bits valid: neither now nor for the step that follows.
        let untouched = held.moved(0);
        for _ in 0..2 {
            let read = held.read_master();
            prop_assert!((0..numel).all(|index| is_same(read[index], expected[index])));
        }
        held.assert_untouched(&untouched, "a read");

        let mut full = Held::zeros(
            Layout::new(ParamKind::Float32, MomentsKind::Float32, Dtype::BFloat16),
            numel,
            0,
        );
        let (exp_avg, exp_avg_sq) = held.read_moments();
        full.write(&expected, &exp_avg, &exp_avg_sq);
        full.grad.payload_mut().copy_from_slice(held.grad.payload());
        for count in 2..4 {
            for held in [&mut held, &mut full] {
                held.step(isa, count, &hyper);
            }
            let (ours, theirs) = (held.read_master(), full.read_master());
            prop_assert!((0..numel).all(|index| is_same(ours[index], theirs[index])));
        }
    }
}

/// Every change of one element, at every position of a whole chunk.
#[test]
fn a_fingerprint_sees_every_single_change() {
    let isa = widest();
    let lens: &[usize] = if is_hurried() {
        &[1, 2, 77, 1000]
    } else {
        &[1, 2, 16, 17, 63, 64, 65, 127, 1000, CHUNK_LEN]
    };
    for &len in lens {
        let mut values = bf16s(len as u64, len);
        let before = isa.run(Fingerprint(&values));
        for index in 0..len {
            let was = values[index];
            // A flipped bit, which is what the smallest and the largest changes are.
            values[index] = Bf16(was.0 ^ (1 << (index % 16)));
            assert_ne!(isa.run(Fingerprint(&values)), before, "element {index} of {len}");
            values[index] = was;
        }
        assert_eq!(isa.run(Fingerprint(&values)), before);
    }
}

/// What people do to weights, which is anything but random: no two of some ten thousand such
/// parameters look alike.
#[test]
fn a_fingerprint_tells_structured_parameters_apart() {
    const LEN: usize = 1 << 11;
    let isa = widest();
    let mut draw = Draw::new(12);
    let random: Vec<Bf16> =
        (0..LEN).map(|_| Bf16(half::bf16::from_f64(draw.normal()).to_bits())).collect();
    // Zeros, ones and twos, whose patterns differ in a few of their upper bits.
    let few: Vec<Bf16> =
        (0..LEN).map(|index| Bf16([0, 0x3f80, 0x4000][index * index % 3])).collect();
    let mut seen = std::collections::HashMap::new();
    let mut see = |what: String, values: Vec<Bf16>| {
        let fingerprint = isa.run(Fingerprint(&values));
        if let Some((other, before)) = seen.insert(fingerprint, (what.clone(), values.clone())) {
            assert!(before == values, "`{what}` looks like `{other}`");
        }
    };
    for (name, values) in [("random", &random), ("few", &few)] {
        let each = |change: &dyn Fn(usize, u16) -> u16| -> Vec<Bf16> {
            values.iter().enumerate().map(|(index, value)| Bf16(change(index, value.0))).collect()
        };
        see(name.to_owned(), values.clone());
        see(format!("{name}, negated"), each(&|_, bits| bits ^ 0x8000));
        see(format!("{name}, magnitudes"), each(&|_, bits| bits & 0x7fff));
        for exponent in 1..8 {
            see(format!("{name}, times 2^{exponent}"), each(&|_, bits| bits + (exponent << 7)));
        }
        for period in 1..100 {
            see(
                format!("{name}, every {period}th negated"),
                each(&|index, bits| if index % period == 0 { bits ^ 0x8000 } else { bits }),
            );
            see(
                format!("{name}, every {period}th zero"),
                each(&|index, bits| if index % period == 0 { 0 } else { bits }),
            );
        }
        for shift in 1..LEN {
            let mut rotated = values.clone();
            rotated.rotate_left(shift);
            see(format!("{name}, rotated by {shift}"), rotated);
        }
        for distance in (1..LEN - 1).step_by(if is_hurried() { 64 } else { 1 }) {
            let mut swapped = values.clone();
            let at = draw.below(LEN - distance);
            swapped.swap(at, at + distance);
            see(format!("{name}, {at} swapped with {}", at + distance), swapped);
        }
        for rows in [16, 32, 64, 256, 1024] {
            let mut swapped = values.clone();
            let (first, second) = swapped[..2 * rows].split_at_mut(rows);
            first.swap_with_slice(second);
            see(format!("{name}, two rows of {rows} swapped"), swapped);
        }
    }
    for value in [0, 0x8000, 0x3f80, 0xbf80, 0x4000, 0x3f00, 0x7fc0, 0xffff] {
        for len in (1..LEN).step_by(if is_hurried() { 61 } else { 7 }) {
            see(format!("{len} times {value:#x}"), vec![Bf16(value); len]);
        }
    }
}

/// All 65,535 other values of one element.
#[test]
fn a_fingerprint_sees_every_other_value() {
    let isa = widest();
    let mut values = bf16s(3, 130);
    let before = isa.run(Fingerprint(&values));
    for index in [0, 15, 16, 32, 64, 127, 129] {
        let was = values[index];
        for bits in (0..=u16::MAX).filter(|&bits| bits != was.0) {
            values[index] = Bf16(bits);
            assert_ne!(isa.run(Fingerprint(&values)), before, "element {index}, {bits:#x}");
        }
        values[index] = was;
    }
}

/// The case that must never be: 0 beside a stale -5 would decode to a NaN.
#[test]
fn stale_bits_never_make_a_nan() {
    let isa = widest();
    for trailing in [-5, i16::MIN, -1, 1, i16::MAX] {
        let mut held = split_of(70);
        held.write_master(&[1.0; 70]);
        held.trailing.as_mut().expect("the layout has it").slice_mut::<i16>().fill(trailing);
        held.param.slice_mut::<Bf16>().fill(Bf16(0));
        assert_eq!(held.read_master(), [0.0; 70]);
        held.step(isa, 1, &Hyper::default());
        assert_eq!(held.read_master(), [0.0; 70], "a gradient of 0 moved it");
    }
}

/// A state of zeros is a fresh one: a fingerprint of 0 fits no parameter, whatever the trailing
/// bits.
#[test]
fn a_fingerprint_of_zero_is_void() {
    let mut held = split_of(100);
    for (index, value) in held.param.slice_mut::<Bf16>().iter_mut().enumerate() {
        *value = Bf16(0x3f80 + index as u16);
    }
    held.trailing.as_mut().expect("the layout has it").slice_mut::<i16>().fill(0x1234);
    assert_eq!(held.read_master(), held.param.values());
}

/// Beside a separate master, every element is judged alone: one that is not its rounded master was
/// written by other code.
#[test]
fn a_shadowed_parameter_wins_where_it_was_written() {
    let isa = widest();
    let layout = Layout::new(ParamKind::Shadowed, MomentsKind::Float32, Dtype::Float16);
    let mut held = Held::random(layout, 300, 0, Spread::Ordinary, 21);
    held.step(isa, 1, &Hyper::default());
    let exact = held.read_master();
    // Another value, the other zero, an infinity, a NaN of another payload.
    let writes = [(3, 0x3c01), (17, 0x8000), (64, 0x7c00), (128, 0x7e55), (299, 0x0001)];
    for (index, bits) in writes {
        held.param.slice_mut::<F16>()[index] = F16(bits);
    }
    let read = held.read_master();
    for (index, value) in read.into_iter().enumerate() {
        let written = writes.iter().find(|(at, _)| *at == index);
        let expected =
            written.map_or(exact[index], |(_, bits)| half::f16::from_bits(*bits).to_f32());
        assert!(is_same(value, expected), "element {index}: {value:e}, expected {expected:e}");
    }
    // The same value again counts as no write: the master keeps what the parameter cannot hold.
    let unchanged = held.param.slice::<F16>()[5];
    held.param.slice_mut::<F16>()[5] = unchanged;
    assert_eq!(held.read_master()[5], exact[5]);
    assert_ne!(exact[5], held.param.value(5), "the master holds more than the parameter");
}

/// A caller that alone writes the parameter leaves fingerprints out of the steps, and takes them
/// before other code may write it.
#[test]
fn steps_without_fingerprints_are_the_same_where_nobody_writes() {
    let layout = Layout::new(ParamKind::Split, MomentsKind::Float32, Dtype::BFloat16);
    let hyper = Hyper::default();
    let mut looked_at = Held::zeros(layout, CHUNK_LEN + 33, 0);
    looked_at.write_master(&vec![0.3; CHUNK_LEN + 33]);
    looked_at.set_grad(|index| (index % 7) as f32 - 3.0);
    let mut alone = looked_at.moved(3);
    for count in 1..=3 {
        looked_at.step(widest(), count, &hyper);
        let tensor = alone.tensor().without_fingerprints();
        // SAFETY: the views are of `alone`, which nothing else uses.
        unsafe { step(pool(), widest(), &[tensor], &[count], &hyper) }.expect("a valid step");
    }
    assert_ne!(
        alone.fingerprints.as_ref().map(|each| each.payload().to_vec()),
        looked_at.fingerprints.as_ref().map(|each| each.payload().to_vec()),
        "they are behind"
    );
    let tensor = alone.tensor();
    // SAFETY: as above.
    unsafe { take_fingerprints(pool(), widest(), &tensor) }.expect("a split master");
    alone.assert_same(&mut looked_at, "the same state");
    let without = tensor.without_fingerprints();
    // SAFETY: it is refused.
    let message = unsafe { take_fingerprints(pool(), widest(), &without) }
        .expect_err("must be refused")
        .to_string();
    assert!(message.contains("fingerprints"), "{message}");
}
