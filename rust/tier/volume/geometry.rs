//! Geometry: where the bytes of each record lie on the members.
//!
//! Records are cut into stripes of at most `stripe_bytes`. Stripe after stripe goes to the member
//! that is the least full for its weight, so members hold, and move, bytes in proportion to their
//! weights, in any run of records that is long against a stripe. A record that is no longer than a
//! stripe lies in one piece on one member.
//!
//! A [`Geometry`] is pure: it knows no files. It follows from the stored sizes, the weights and the
//! stripe, so none of it is written down.
//!
//! - GEO-1 The pieces of a record, in order, are its bytes: none missing, none twice.
//! - GEO-2 On each member the pieces of all records fill its space from 0 on, without a gap and
//!   without overlap.
//! - GEO-3 Offsets and sizes of pieces are multiples of the block.
//! - GEO-4 After any number of stripes, no member takes longer for what it holds than any other one
//!   would with a stripe more, each at the bandwidth that its weight says.
//!
//! Cost: 16 B per piece and 4 B per record, in memory; made in one pass.

use crate::{Error, Result};

/// The most members of a volume.
pub const MEMBERS_MAX: usize = 64;

/// The largest stripe: io_uring registers no larger memory as one buffer.
pub const STRIPE_BYTES_MAX: usize = 1 << 30;

/// The largest weight of a member.
pub const WEIGHT_MAX: u32 = 1 << 20;

/// A run of bytes of a record on one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins in the member's space of records, in bytes.
    pub offset: u64,
    /// Its size in bytes.
    pub nbytes: u32,
    /// On which member it lies.
    pub member: u16,
}

/// The place of every record. See the [module](self).
#[derive(Debug)]
pub struct Geometry {
    pieces: Box<[Piece]>,
    /// For each record the number of its first piece, and one more for the end.
    first: Box<[u32]>,
    member_nbytes: Box<[u64]>,
}

impl Geometry {
    /// The places of records of these stored sizes (multiples of the block) on members of these
    /// weights.
    ///
    /// # Errors
    /// [`Error::Value`] for no members or more than [`MEMBERS_MAX`], a weight of 0 or beyond
    /// [`WEIGHT_MAX`], or more pieces than can be counted.
    pub fn new(
        stored_nbytes: impl Iterator<Item = u64>,
        weights: &[u32],
        stripe_bytes: usize,
    ) -> Result<Self> {
        check_weights(weights)?;
        let stripe = stripe_bytes as u64;
        let mut member_nbytes = vec![0_u64; weights.len()];
        let mut pieces = Vec::new();
        let mut first = vec![0];
        for nbytes in stored_nbytes {
            let mut rest = nbytes;
            while rest > 0 {
                let nbytes = rest.min(stripe);
                let member = least_full(&member_nbytes, weights, nbytes);
                pieces.push(Piece {
                    offset: member_nbytes[member],
                    nbytes: nbytes as u32,
                    member: member as u16,
                });
                member_nbytes[member] += nbytes;
                rest -= nbytes;
            }
            first.push(u32::try_from(pieces.len()).map_err(|_| {
                Error::value(format!(
                    "the records have more than `{}` stripes\nhint: larger stripes or records",
                    u32::MAX
                ))
            })?);
        }
        Ok(Self { pieces: pieces.into(), first: first.into(), member_nbytes: member_nbytes.into() })
    }

    /// Of no records.
    pub(super) fn empty() -> Self {
        Self { pieces: [].into(), first: [0].into(), member_nbytes: [].into() }
    }

    /// The pieces of a record, in the order of its bytes.
    ///
    /// # Panics
    /// For a record that there is not.
    #[must_use]
    pub fn pieces(&self, record: usize) -> &[Piece] {
        &self.pieces[self.first[record] as usize..self.first[record + 1] as usize]
    }

    /// What all records take on each member, in bytes.
    #[must_use]
    pub fn member_nbytes(&self) -> &[u64] {
        &self.member_nbytes
    }
}

/// The member that is the least full for its weight once it has `nbytes` more; the first of equals.
fn least_full(member_nbytes: &[u64], weights: &[u32], nbytes: u64) -> usize {
    let filled = |member: usize| u128::from(member_nbytes[member] + nbytes);
    let mut least = 0;
    for member in 1..weights.len() {
        let [this, other] = [member, least].map(|member| u128::from(weights[member]));
        if filled(member) * other < filled(least) * this {
            least = member;
        }
    }
    least
}

fn check_weights(weights: &[u32]) -> Result<()> {
    if weights.is_empty() || weights.len() > MEMBERS_MAX {
        return Err(Error::value(format!(
            "a volume of `{}` members, expected 1 to {MEMBERS_MAX}",
            weights.len()
        )));
    }
    match weights.iter().position(|weight| !(1..=WEIGHT_MAX).contains(weight)) {
        None => Ok(()),
        Some(member) => Err(Error::value(format!(
            "the weight of member `{member}` is `{}`, expected 1 to {WEIGHT_MAX}\nhint: a weight \
             is the bandwidth of a member, in any unit, such as MB/s",
            weights[member]
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: u64 = 4096;

    fn geometry(blocks: &[u64], weights: &[u32], stripe_blocks: usize) -> Geometry {
        let stored = blocks.iter().map(|blocks| blocks * BLOCK);
        Geometry::new(stored, weights, stripe_blocks * BLOCK as usize).expect("a geometry")
    }

    /// Which byte block of which record every block of every member holds, placed stripe by stripe
    /// with exact fractions written out.
    fn oracle(blocks: &[u64], weights: &[u32], stripe_blocks: u64) -> Vec<Vec<(usize, u64)>> {
        let mut members = vec![Vec::new(); weights.len()];
        for (record, &num) in blocks.iter().enumerate() {
            for begin in (0..num).step_by(stripe_blocks as usize) {
                let end = (begin + stripe_blocks).min(num);
                let fullness = |member: usize| {
                    let after = members[member].len() as u64 + (end - begin);
                    let others: u64 = weights
                        .iter()
                        .enumerate()
                        .filter(|(other, _)| *other != member)
                        .map(|(_, &weight)| u64::from(weight))
                        .product();
                    after * others
                };
                let member = (0..weights.len()).min_by_key(|&member| fullness(member));
                members[member.expect("a member")]
                    .extend((begin..end).map(|block| (record, block)));
            }
        }
        members
    }

    proptest! {
        /// GEO-1 to GEO-3.
        #[test]
        fn pieces_are_where_the_oracle_has_them(
            blocks in prop::collection::vec(0_u64..9, 0..40),
            weights in prop::collection::vec(1_u32..20, 1..5),
            stripe_blocks in 1_usize..6,
        ) {
            let geometry = geometry(&blocks, &weights, stripe_blocks);
            let expected = oracle(&blocks, &weights, stripe_blocks as u64);
            let mut found: Vec<Vec<Option<(usize, u64)>>> = expected
                .iter()
                .map(|member| vec![None; member.len()])
                .collect();
            for (record, &num) in blocks.iter().enumerate() {
                let mut block = 0;
                for piece in geometry.pieces(record) {
                    let (offset, nbytes) = (piece.offset, u64::from(piece.nbytes));
                    prop_assert!(offset.is_multiple_of(BLOCK) && nbytes.is_multiple_of(BLOCK));
                    prop_assert!(nbytes > 0 && nbytes <= stripe_blocks as u64 * BLOCK);
                    for place in offset / BLOCK..(offset + nbytes) / BLOCK {
                        let found = &mut found[usize::from(piece.member)][place as usize];
                        prop_assert_eq!(found.replace((record, block)), None, "overlap");
                        block += 1;
                    }
                }
                prop_assert_eq!(block, num);
            }
            let expected: Vec<Vec<_>> = expected
                .into_iter()
                .map(|member| member.into_iter().map(Some).collect())
                .collect();
            prop_assert_eq!(found, expected);
        }

        /// GEO-4.
        #[test]
        fn no_member_takes_longer_than_another_with_a_stripe_more(
            num in 1_usize..400,
            weights in prop::collection::vec(1_u32..1000, 1..9),
        ) {
            let geometry = geometry(&vec![1; num], &weights, 1);
            let held = |member: usize| geometry.member_nbytes()[member];
            for member in 0..weights.len() {
                for other in 0..weights.len() {
                    let [this, other_weight] = [member, other].map(|m| u64::from(weights[m]));
                    prop_assert!(held(member) * other_weight <= (held(other) + BLOCK) * this);
                }
            }
        }
    }

    #[test]
    fn a_slow_member_gets_less() {
        let geometry = geometry(&[1; 10], &[400, 400, 200], 1);
        let members: Vec<u16> = (0..10).map(|record| geometry.pieces(record)[0].member).collect();
        assert_eq!(members[..5], members[5..]);
        assert_eq!(geometry.member_nbytes(), [4 * BLOCK, 4 * BLOCK, 2 * BLOCK]);
    }

    #[test]
    fn what_is_refused_is_named() {
        let refused = |weights: &[u32]| {
            Geometry::new([BLOCK].into_iter(), weights, 1 << 20).expect_err("refused").to_string()
        };
        assert!(refused(&[]).contains("`0` members"));
        assert!(refused(&[1; 65]).contains("`65` members"));
        assert!(refused(&[3, 0]).contains("member `1` is `0`"));
        assert!(refused(&[WEIGHT_MAX + 1]).contains("member `0`"));
    }
}
