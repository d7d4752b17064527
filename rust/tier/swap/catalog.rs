//! The catalog: the record that says what the others are of, and how often each tensor was stepped.
//!
//! ```text
//! magic (8 B) | version u32 | state format u32 | tensors u64 | identity u64 | run u64 |
//! numel u64, count u64, kind (32 B) of each |
//! ```
//!
//! The version is that of these bytes, and counts up where they change. Catalogs before version 2
//! have the state format in its place, which was always 1.
//!
//! The identity is the caller's, of what the tensors are beside that: their names and shapes. The
//! run is the caller's, too: volumes that step together have the same.
//! Integers are little-endian. The volume has a checksum of it. Its own version is of what is
//! around records.

use crate::state::{STATE_FORMAT, codecs::MasterKind, layout::Layout};

const MAGIC: &[u8; 8] = b"swstates";
/// The version of all of this.
const VERSION: u32 = 3;
/// Of what is the same in all runs.
const SAME_BYTES: usize = 32;
const HEAD_BYTES: usize = SAME_BYTES + 8;
const KIND_BYTES: usize = 32;
const TENSOR_BYTES: usize = 16 + KIND_BYTES;

/// Bytes of the catalog of so many tensors.
pub(super) fn nbytes(tensors: usize) -> usize {
    HEAD_BYTES + tensors * TENSOR_BYTES
}

/// What a layout is, beside its size, for people: parameter, master, moments, rounded copy.
fn kind(layout: &Layout, is_packed: bool) -> [u8; KIND_BYTES] {
    let master = match layout.master {
        MasterKind::Float32 if is_packed => "packed",
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
pub(super) fn encode(
    layouts: &[(Layout, bool)],
    identity: u64,
    catalog: &Catalog,
    bytes: &mut [u8],
) {
    let (head, rest) = bytes.split_at_mut(HEAD_BYTES);
    head[..SAME_BYTES].copy_from_slice(&head_of(layouts.len(), identity));
    head[SAME_BYTES..].copy_from_slice(&catalog.run.to_le_bytes());
    let each = rest.chunks_exact_mut(TENSOR_BYTES);
    for (((layout, is_packed), count), place) in layouts.iter().zip(&catalog.counts).zip(each) {
        place[..8].copy_from_slice(&(layout.numel() as u64).to_le_bytes());
        place[8..16].copy_from_slice(&count.to_le_bytes());
        place[16..].copy_from_slice(&kind(layout, *is_packed));
    }
}

fn head_of(tensors: usize, identity: u64) -> [u8; SAME_BYTES] {
    let mut head = [0; SAME_BYTES];
    head[..8].copy_from_slice(MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..16].copy_from_slice(&STATE_FORMAT.to_le_bytes());
    head[16..24].copy_from_slice(&(tensors as u64).to_le_bytes());
    head[24..].copy_from_slice(&identity.to_le_bytes());
    head
}

/// Why bytes are not the catalog of some tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoCatalog {
    /// Another release wrote it.
    Release {
        /// What it has of another version.
        what: &'static str,
        /// The version that it has.
        found: u32,
        /// The version that this release has.
        expected: u32,
    },
    /// It is of others, or no catalog.
    Foreign,
}

/// What is in `bytes`, a record.
///
/// # Errors
/// [`NoCatalog`], where it is not the catalog of these tensors.
pub(super) fn decode(
    layouts: &[(Layout, bool)],
    identity: u64,
    bytes: &[u8],
) -> Result<Catalog, NoCatalog> {
    // First: what follows, and how long it is, depends on them.
    if let Some(words) = bytes.strip_prefix(MAGIC) {
        let versions = [("catalog", VERSION), ("state format", STATE_FORMAT)];
        for ((what, expected), &word) in versions.into_iter().zip(words.as_chunks().0) {
            let found = u32::from_le_bytes(word);
            if found != expected {
                return Err(NoCatalog::Release { what, found, expected });
            }
        }
    }
    of_these(layouts, identity, bytes).ok_or(NoCatalog::Foreign)
}

fn of_these(layouts: &[(Layout, bool)], identity: u64, bytes: &[u8]) -> Option<Catalog> {
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
    let (same, run) = head.split_at(SAME_BYTES);
    if same != head_of(layouts.len(), identity) || rest.len() != layouts.len() * TENSOR_BYTES {
        return None;
    }
    let run = u64::from_le_bytes(run.try_into().ok()?);
    let each = layouts.iter().zip(rest.chunks_exact(TENSOR_BYTES));
    let counts = each.map(|((layout, is_packed), bytes)| {
        let is_same = bytes[..8] == (layout.numel() as u64).to_le_bytes()
            && bytes[16..] == kind(layout, *is_packed);
        let count = u64::from_le_bytes(bytes[8..16].try_into().ok()?);
        is_same.then_some(count)
    });
    Some(Catalog { run, counts: counts.collect::<Option<_>>()? })
}
