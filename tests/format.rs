//! What stored state means, pinned: a state dict that was saved is to load as what it was.

mod battery;

use battery::{Held, Layout, MomentsKind, ParamKind, pool, widest};
use stepwell::{
    adam::exchange::take_fingerprints,
    state::STATE_FORMAT,
    stream::{
        BLOCK,
        element::{Bf16, Dtype},
    },
};

/// Whole blocks and a piece of one.
const NUMEL: usize = 5 * BLOCK + 11;

/// FNV-1a.
fn digest(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// State of fixed bytes: every q8 code, bf16 parameters of every sign and of some exponents, and
/// trailing bits of both signs.
fn fixed() -> Held {
    let mut held =
        Held::zeros(Layout::new(ParamKind::Split, MomentsKind::Q8, Dtype::BFloat16), NUMEL, 0);
    for (index, byte) in held.exp_avg.payload_mut().iter_mut().enumerate() {
        *byte = (index * 37) as u8;
    }
    for (index, byte) in held.exp_avg_sq.payload_mut().iter_mut().enumerate() {
        *byte = (index * 41 + 7) as u8;
    }
    for scales in [&mut held.exp_avg_scales, &mut held.exp_avg_sq_scales].into_iter().flatten() {
        for (index, scale) in scales.slice_mut::<Bf16>().iter_mut().enumerate() {
            *scale = Bf16(0x3a10 + 0x31 * index as u16);
        }
    }
    for (index, weight) in held.param.slice_mut::<Bf16>().iter_mut().enumerate() {
        *weight = Bf16((0x3c00 + (index * 11) as u16) | (u16::from(index % 3 == 0) << 15));
    }
    for (index, low) in
        held.trailing.as_mut().expect("split").slice_mut::<i16>().iter_mut().enumerate()
    {
        *low = (index * 1103) as i16;
    }
    held
}

#[test]
fn a_change_of_what_stored_bytes_mean_is_another_format() {
    let mut held = fixed();
    let tensor = held.tensor();
    // SAFETY: the views are of `held`, which is this function's.
    unsafe { take_fingerprints(pool(), widest(), &tensor) }.expect("split");
    let fingerprints = digest(held.fingerprints.as_ref().expect("split").payload().iter().copied());
    let masters = digest(held.read_master().into_iter().flat_map(f32::to_le_bytes));
    let (exp_avg, exp_avg_sq) = held.read_moments();
    let moments =
        [exp_avg, exp_avg_sq].map(|moment| digest(moment.into_iter().flat_map(f32::to_le_bytes)));
    assert_eq!(
        (STATE_FORMAT, fingerprints, masters, moments),
        (
            1,
            0xcc6b_674b_5758_19fc,
            0x3415_6c37_3126_6745,
            [0x5692_d67d_905e_1ce4, 0xcfd1_3d92_8bb6_3175]
        ),
        "saved state reads differently: count STATE_FORMAT up, and write the new numbers here"
    );
}
