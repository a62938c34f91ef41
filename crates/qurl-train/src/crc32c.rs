//! CRC-32C (Castagnoli): the checksum of event files, and of the files of a checkpoint.
//!
//! Eight bytes a step over eight tables, which is plenty for files that are written in the background.

const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

/// A checksum that grows with the data.
#[derive(Clone, Copy, Debug)]
pub struct Crc32c(u32);

impl Default for Crc32c {
    fn default() -> Self {
        Crc32c(!0)
    }
}

impl Crc32c {
    /// Takes more bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let (eights, rest) = bytes.as_chunks::<8>();
        for chunk in eights {
            let word = u64::from_le_bytes(*chunk) ^ u64::from(self.0);
            self.0 = word
                .to_le_bytes()
                .iter()
                .zip(TABLES.iter().rev())
                .fold(0, |crc, (&byte, table)| crc ^ table[usize::from(byte)]);
        }
        for &byte in rest {
            self.0 = (self.0 >> 8) ^ TABLES[0][((self.0 ^ u32::from(byte)) & 0xff) as usize];
        }
    }

    /// The checksum of all bytes so far.
    pub fn value(self) -> u32 {
        !self.0
    }
}

/// The checksum of some bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = Crc32c::default();
    crc.update(bytes);
    crc.value()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn pieces_give_the_same() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i * i) as u8).collect();
        for cut in [0, 1, 7, 8, 9, 500, 999, 1000] {
            let mut crc = Crc32c::default();
            crc.update(&bytes[..cut]);
            crc.update(&bytes[cut..]);
            assert_eq!(crc.value(), crc32c(&bytes), "cut at {cut}");
        }
    }
}
