//! What holds for the sources: each folder of `rust/` uses only the layers below it, and lines are
//! short also where rustfmt does not look.

use std::{fs, path::Path};

/// From the bottom.
const LAYERS: [&str; 12] = [
    "error", "sync", "simd", "host", "stream", "state", "adam", "grads", "device", "tier",
    "offload", "python",
];

/// Every `crate::` path of a source, with the names that a `use crate::{...}` lists at its first
/// level.
fn first_segments(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, prefix) in source.match_indices("crate::") {
        let rest = &source[at + prefix.len()..];
        let Some(list) = rest.strip_prefix('{') else {
            found.push(name_at(rest));
            continue;
        };
        let mut depth = 0;
        let mut is_name_next = true;
        for (index, character) in list.char_indices() {
            match character {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => is_name_next = true,
                _ if is_name_next && depth == 0 && !character.is_whitespace() => {
                    found.push(name_at(&list[index..]));
                    is_name_next = false;
                }
                _ => {}
            }
        }
    }
    found
}

fn name_at(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path())
    {
        if entry.is_dir() {
            sources(&entry, found);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found
                .push((entry.display().to_string(), fs::read_to_string(&entry).expect("a source")));
        }
    }
}

/// rustfmt leaves comments, strings and macros as they are.
#[test]
fn lines_are_within_100_columns() {
    let mut sources_found = Vec::new();
    for folder in ["rust", "tests", "benches"] {
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut sources_found);
    }
    assert!(sources_found.len() > 50, "{} sources", sources_found.len());
    for (file, source) in &sources_found {
        for (number, line) in source.lines().enumerate() {
            let columns = line.chars().count();
            assert!(columns <= 100, "{file}:{} has {columns} columns", number + 1);
        }
    }
}

#[test]
fn a_layer_uses_only_layers_below_it() {
    let mut sources_found = Vec::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("rust");
    for (rank, layer) in LAYERS.iter().enumerate().skip(1) {
        sources_found.clear();
        let folder = root.join(layer);
        if folder.is_dir() {
            sources(&folder, &mut sources_found);
        } else {
            let file = folder.with_extension("rs");
            let source = fs::read_to_string(&file).expect("a source");
            sources_found.push((file.display().to_string(), source));
        }
        assert!(!sources_found.is_empty(), "rust/{layer} has no sources");
        for (file, source) in &sources_found {
            // Documentation may point upwards.
            let code: String = source
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .collect::<Vec<_>>()
                .join("\n");
            for name in first_segments(&code) {
                let used = LAYERS.iter().position(|other| *other == name);
                assert!(
                    used.is_none_or(|used| used <= rank),
                    "{file} uses crate::{name}, a layer above rust/{layer}"
                );
            }
        }
    }
}
