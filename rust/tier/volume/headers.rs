//! The two copies of a header, and what they say together. One that cannot be read, or is damaged,
//! takes nothing from the other.

use std::io;

use super::format::{Extents, Header, NoHeader};

/// What a copy of a header is, or why it cannot be read.
pub(super) type Copied = io::Result<Result<Header, NoHeader>>;

/// Both copies, of which `read` reads each to `space`, from an offset on.
pub(super) fn copies(
    space: &mut [u8],
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>,
) -> [Copied; 2] {
    [0, 1].map(|copy| read(space, Extents::header_offset(copy)).map(|()| Header::decode(space)))
}

/// The copy that is a header; where none is, the one that says most of why.
pub(super) fn best([first, second]: [Copied; 2]) -> Copied {
    let rank = |copy: &Copied| match copy {
        Ok(Ok(_)) => 0,
        Ok(Err(NoHeader::Damaged | NoHeader::Version(_))) => 1,
        Ok(Err(NoHeader::Label)) => 2,
        Err(_) => 3,
        Ok(Err(NoHeader::Foreign)) => 4,
        Ok(Err(NoHeader::Blank)) => 5,
    };
    if rank(&second) < rank(&first) { second } else { first }
}
