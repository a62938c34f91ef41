//! Formats, devices and what is recomputed are written by their names.

/// A format by its name.
pub(crate) mod format_name {
    use qurl_kernels::Format;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(format: &Format, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(format.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<Format, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Devices by their names.
pub(crate) mod device_name {
    use qurl_kernels::DeviceKind;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(device: &DeviceKind, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(device.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<DeviceKind, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// What is recomputed, by its name; true and false, as recipes had them, are all of a block and nothing.
pub(crate) mod recompute_name {
    use qurl_model::compute::Recompute;
    use serde::{Deserializer, Serializer, de};
    use std::fmt;

    struct Name;

    impl de::Visitor<'_> for Name {
        type Value = Recompute;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("none, mlp or block")
        }

        fn visit_bool<E: de::Error>(self, whole: bool) -> Result<Recompute, E> {
            Ok(if whole { Recompute::Block } else { Recompute::None })
        }

        fn visit_str<E: de::Error>(self, name: &str) -> Result<Recompute, E> {
            name.parse().map_err(E::custom)
        }
    }

    pub fn serialize<S: Serializer>(recompute: &Recompute, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(recompute.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<Recompute, D::Error> {
        deserializer.deserialize_any(Name)
    }
}
