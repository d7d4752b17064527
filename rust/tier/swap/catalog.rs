//! The catalog: the record that says what the others are of, and how often each tensor was stepped.
//!
//! ```text
//! magic (8 B) | state format u32 | tensors u32 | identity u64 | run u64 |
//! numel u64, count u64, kind (32 B) of each |
//! ```
//!
//! The identity is the caller's, of what the tensors are beside that: their names and shapes. The
//! run is the caller's, too: volumes that step together have the same.
//! Integers are little-endian. The volume has a checksum of it, and its own version.

use crate::state::{STATE_FORMAT, codecs::MasterKind, layout::Layout};

const MAGIC: &[u8; 8] = b"swstates";
/// Of what is the same in all runs.
const SAME_BYTES: usize = 24;
const HEAD_BYTES: usize = SAME_BYTES + 8;
const KIND_BYTES: usize = 32;
const TENSOR_BYTES: usize = 16 + KIND_BYTES;

/// Bytes of the catalog of so many tensors.
pub(super) fn nbytes(tensors: usize) -> usize {
    HEAD_BYTES + tensors * TENSOR_BYTES
}

/// What a layout is, beside its size, for people: parameter, master, moments, rounded copy.
fn kind(layout: &Layout) -> [u8; KIND_BYTES] {
    let master = match layout.master {
        MasterKind::Float32 => "itself",
        // Fingerprints are not on the volume.
        MasterKind::Split { .. } => "split",
        MasterKind::Shadowed => "shadowed",
        MasterKind::Plain16 => "none",
    };
    let mut text = [layout.param.name(), master, layout.moments.name()].join(" ");
    if let Some(weight) = layout.weight_out {
        text = [&text, weight.name()].join(" ");
    }
    let mut kind = [0; KIND_BYTES];
    kind.iter_mut().zip(text.bytes()).for_each(|(place, byte)| *place = byte);
    kind
}

/// What a commit says of its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Catalog {
    /// Of the run that made the commit.
    pub run: u64,
    /// How many updates each tensor has seen.
    pub counts: Vec<u64>,
}

/// Writes it to the beginning of `bytes`.
pub(super) fn encode(layouts: &[Layout], identity: u64, catalog: &Catalog, bytes: &mut [u8]) {
    let (head, rest) = bytes.split_at_mut(HEAD_BYTES);
    head[..SAME_BYTES].copy_from_slice(&head_of(layouts.len(), identity));
    head[SAME_BYTES..].copy_from_slice(&catalog.run.to_le_bytes());
    let each = rest.chunks_exact_mut(TENSOR_BYTES);
    for ((layout, count), place) in layouts.iter().zip(&catalog.counts).zip(each) {
        place[..8].copy_from_slice(&(layout.numel() as u64).to_le_bytes());
        place[8..16].copy_from_slice(&count.to_le_bytes());
        place[16..].copy_from_slice(&kind(layout));
    }
}

fn head_of(tensors: usize, identity: u64) -> [u8; SAME_BYTES] {
    let mut head = [0; SAME_BYTES];
    head[..8].copy_from_slice(MAGIC);
    head[8..12].copy_from_slice(&STATE_FORMAT.to_le_bytes());
    head[12..16].copy_from_slice(&(tensors as u32).to_le_bytes());
    head[16..].copy_from_slice(&identity.to_le_bytes());
    head
}

/// What is in `bytes`; None: it is the catalog of others.
pub(super) fn decode(layouts: &[Layout], identity: u64, bytes: &[u8]) -> Option<Catalog> {
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
    let (same, run) = head.split_at(SAME_BYTES);
    if same != head_of(layouts.len(), identity) || rest.len() < layouts.len() * TENSOR_BYTES {
        return None;
    }
    let run = u64::from_le_bytes(run.try_into().ok()?);
    let each = layouts.iter().zip(rest.chunks_exact(TENSOR_BYTES));
    let counts = each.map(|(layout, bytes)| {
        let is_same =
            bytes[..8] == (layout.numel() as u64).to_le_bytes() && bytes[16..] == kind(layout);
        let count = u64::from_le_bytes(bytes[8..16].try_into().ok()?);
        is_same.then_some(count)
    });
    Some(Catalog { run, counts: counts.collect::<Option<_>>()? })
}
