//! Facts of a step as bytes, for the other ranks: every bit survives.
//!
//! Both ends are the same program, so there are no names and no versions: values follow each other, little
//! end first, lists after their length.

/// A value that goes to other ranks.
pub trait Wire: Sized {
    /// Appends its bytes.
    fn put(&self, to: &mut Vec<u8>);
    /// Takes its bytes off the front; none where they are not those of such a value.
    fn take(from: &mut &[u8]) -> Option<Self>;

    /// Its bytes.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.put(&mut bytes);
        bytes
    }
}

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl Wire for $type {
            fn put(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }

            fn take(from: &mut &[u8]) -> Option<Self> {
                let (bytes, rest) = from.split_first_chunk()?;
                *from = rest;
                Some(<$type>::from_le_bytes(*bytes))
            }
        }
    )*};
}
numbers!(u8, u32, u64, f32, f64);

impl Wire for usize {
    fn put(&self, to: &mut Vec<u8>) {
        (*self as u64).put(to);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        u64::take(from)?.try_into().ok()
    }
}

impl Wire for bool {
    fn put(&self, to: &mut Vec<u8>) {
        u8::from(*self).put(to);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        u8::take(from).map(|byte| byte != 0)
    }
}

impl Wire for String {
    fn put(&self, to: &mut Vec<u8>) {
        self.len().put(to);
        to.extend_from_slice(self.as_bytes());
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let len = usize::take(from)?;
        let (text, rest) = from.split_at_checked(len)?;
        *from = rest;
        String::from_utf8(text.to_vec()).ok()
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, to: &mut Vec<u8>) {
        self.len().put(to);
        self.iter().for_each(|value| value.put(to));
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let len = usize::take(from)?;
        (0..len).map(|_| T::take(from)).collect()
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, to: &mut Vec<u8>) {
        self.is_some().put(to);
        self.iter().for_each(|value| value.put(to));
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(if bool::take(from)? { Some(T::take(from)?) } else { None })
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, to: &mut Vec<u8>) {
        self.0.put(to);
        self.1.put(to);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some((A::take(from)?, B::take(from)?))
    }
}

/// A struct by its fields, in their order.
macro_rules! wire {
    ($type:path { $($field:ident),* $(,)? }) => {
        impl $crate::wire::Wire for $type {
            fn put(&self, to: &mut Vec<u8>) {
                $($crate::wire::Wire::put(&self.$field, to);)*
            }

            fn take(from: &mut &[u8]) -> Option<Self> {
                $(let $field = $crate::wire::Wire::take(from)?;)*
                Some(Self { $($field),* })
            }
        }
    };
}
pub(crate) use wire;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_comes_back_and_torn_bytes_do_not() {
        type Value = (Vec<(String, Option<u32>)>, Vec<f64>);
        let value: Value =
            (vec![("é".to_string(), None), (String::new(), Some(7))], vec![-0.0, f64::INFINITY, 1e-310]);
        let bytes = value.bytes();
        let mut rest = bytes.as_slice();
        assert_eq!(Value::take(&mut rest), Some(value));
        assert!(rest.is_empty());
        for cut in 0..bytes.len() {
            assert_eq!(Value::take(&mut &bytes[..cut]), None, "{cut} of {} bytes", bytes.len());
        }
        let odd = f32::from_bits(0x7fc0_1234);
        assert_eq!(f32::take(&mut odd.bytes().as_slice()).map(f32::to_bits), Some(odd.to_bits()));
    }
}
