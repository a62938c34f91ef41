//! Which versions of which symbols a binary needs of the libraries that it is linked with, as the loader will
//! look for them. Only what is needed for that is read: 64-bit little-endian ELF with its section headers.

/// A symbol that a library has to have, or, without a symbol, a version that it has to know.
#[derive(Debug, PartialEq)]
pub struct Need {
    pub symbol: Option<String>,
    /// As `GLIBC_2.28`.
    pub version: String,
    /// As `libc.so.6`.
    pub library: String,
}

const DYNAMIC_SYMBOLS: u32 = 11;
const VERSIONS_NEEDED: u32 = 0x6fff_fffe;
const VERSION_OF_SYMBOL: u32 = 0x6fff_ffff;

/// A section: its kind, its place in the file, and the number of the section that holds its strings.
struct Section {
    kind: u32,
    start: usize,
    len: usize,
    link: usize,
}

/// Everything the binary needs that has a version. The error says that it is no such binary.
pub fn needs(binary: &[u8]) -> Result<Vec<Need>, String> {
    if binary.get(..6) != Some(b"\x7fELF\x02\x01") {
        return Err("is no 64-bit little-endian ELF file".to_string());
    }
    read(binary).ok_or_else(|| "is an ELF file with offsets that point outside of it".to_string())
}

fn read(file: &[u8]) -> Option<Vec<Need>> {
    let table = number(file, 0x28, 8)?;
    let (size, count) = (number(file, 0x3a, 2)?, number(file, 0x3c, 2)?);
    let sections: Vec<Section> = (0..count)
        .map(|index| {
            let at = table + index * size;
            let field = |offset, bytes| number(file, at + offset, bytes);
            let (kind, link) = (u32::try_from(field(4, 4)?).ok()?, field(0x28, 4)?);
            Some(Section { kind, start: field(0x18, 8)?, len: field(0x20, 8)?, link })
        })
        .collect::<Option<_>>()?;
    let of_kind = |kind| sections.iter().find(|section| section.kind == kind);
    let (Some(symbols), Some(versions)) = (of_kind(DYNAMIC_SYMBOLS), of_kind(VERSION_OF_SYMBOL)) else {
        return Some(Vec::new());
    };
    let Some(needed) = of_kind(VERSIONS_NEEDED) else { return Some(Vec::new()) };
    let known = known_versions(file, needed, sections.get(needed.link)?)?;
    let names = sections.get(symbols.link)?;
    let mut needs: Vec<Need> = Vec::new();
    for index in 0..symbols.len / 24 {
        let version = number(file, versions.start + index * 2, 2)? & 0x7fff;
        if let Some((_, version, library)) = known.iter().find(|(number, ..)| *number == version) {
            let symbol = text(file, names.start + number(file, symbols.start + index * 24, 4)?)?;
            needs.push(Need { symbol: Some(symbol), version: version.clone(), library: library.clone() });
        }
    }
    for (_, version, library) in known {
        if !needs.iter().any(|need| need.version == version && need.library == library) {
            needs.push(Need { symbol: None, version, library });
        }
    }
    Some(needs)
}

/// The versions needed, each with the number that symbols name it by and its library.
fn known_versions(file: &[u8], needed: &Section, names: &Section) -> Option<Vec<(usize, String, String)>> {
    let mut known = Vec::new();
    let mut at = needed.start;
    loop {
        let library = text(file, names.start + number(file, at + 4, 4)?)?;
        let mut version = at + number(file, at + 8, 4)?;
        for _ in 0..number(file, at + 2, 2)? {
            let name = text(file, names.start + number(file, version + 8, 4)?)?;
            known.push((number(file, version + 6, 2)?, name, library.clone()));
            version += number(file, version + 12, 4)?;
        }
        match number(file, at + 12, 4)? {
            0 => return Some(known),
            next => at += next,
        }
    }
}

/// The number in these bytes, if they are in the file. An offset that no file reaches is none, so sums do not
/// overflow.
fn number(file: &[u8], at: usize, bytes: usize) -> Option<usize> {
    let mut word = [0; 8];
    word[..bytes].copy_from_slice(file.get(at..at + bytes)?);
    usize::try_from(u64::from_le_bytes(word)).ok().filter(|&number| number < 1 << 48)
}

fn text(file: &[u8], at: usize) -> Option<String> {
    let rest = file.get(at..)?;
    let end = rest.iter().position(|&byte| byte == 0)?;
    Some(String::from_utf8_lossy(&rest[..end]).into_owned())
}

/// What of the needs a glibc of version `oldest` does not have. A version that is no number (`GLIBC_PRIVATE`)
/// counts.
pub fn newer_than(needs: &[Need], oldest: (u32, u32)) -> Vec<&Need> {
    let is_newer = |need: &&Need| match need.version.strip_prefix("GLIBC_") {
        None => false,
        Some(numbers) => {
            let mut parts = numbers.split('.').map(|part| part.parse::<u32>().unwrap_or(u32::MAX));
            (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(0)) > oldest
        }
    };
    needs.iter().filter(is_newer).collect()
}

/// One line for a person: `pthread_create, which libc.so.6 has since GLIBC_2.34`.
pub fn described(need: &Need) -> String {
    let symbol = need.symbol.as_deref().unwrap_or("a version");
    format!("{symbol}, which {} has since {}", need.library, need.version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(version: &str) -> Need {
        Need { symbol: Some("f".to_string()), version: version.to_string(), library: "libc.so.6".to_string() }
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        let all =
            ["GLIBC_2.2.5", "GLIBC_2.28", "GLIBC_2.9", "GCC_4.2.0", "GLIBC_2.29", "GLIBC_PRIVATE"].map(need);
        let newer: Vec<&str> = newer_than(&all, (2, 28)).iter().map(|need| need.version.as_str()).collect();
        assert_eq!(newer, ["GLIBC_2.29", "GLIBC_PRIVATE"]);
        assert_eq!(described(&all[4]), "f, which libc.so.6 has since GLIBC_2.29");
    }

    #[test]
    #[cfg(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
    fn this_very_binary_needs_versions_of_libc() {
        let binary = std::fs::read(std::env::current_exe().expect("a path")).expect("a file");
        let needs = needs(&binary).expect("ELF");
        assert!(needs.iter().any(|need| need.symbol.as_deref() == Some("memcpy")), "{needs:?}");
        assert!(needs.iter().all(|need| need.library.contains(".so.")), "{needs:?}");
    }

    #[test]
    fn files_that_are_no_binaries_or_cut_are_refused() {
        assert!(needs(b"#!/bin/sh\n").expect_err("no ELF").contains("no 64-bit"));
        let mut cut = b"\x7fELF\x02\x01".to_vec();
        cut.resize(0x40, 0xff);
        assert!(needs(&cut).expect_err("cut").contains("outside"));
    }
}
