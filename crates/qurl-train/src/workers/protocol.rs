//! What trainer and workers say to each other. Both are the same program in the same version, which is the
//! first thing that is checked; the bytes are those of [`crate::wire`].

use crate::wire::{Wire, wire};
use qurl_kernels::{Format, KvFormat};
use qurl_model::compute::NetworkOptions;
use qurl_rollout::{Request, Sample, SampleKey, Sampling, WeightVersion};

/// Who wants to join.
#[derive(Clone, Debug, PartialEq)]
pub struct Hello {
    /// Program and version.
    pub program: String,
    /// What it computes with ([`qurl_kernels::DeviceInfo::kind`]).
    pub kind: String,
    /// A name for people.
    pub name: String,
}

/// What a worker needs to make its engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Welcome {
    /// The worker's number.
    pub worker: u64,
    /// The model's `config.json`.
    pub config: String,
    /// How it is packed.
    pub network: NetworkOptions,
    /// Memory for keys and values, tokens of a page, sequences and tokens at a time: suggestions, which
    /// change no bits.
    pub engine: [usize; 4],
    /// Seconds after which a silent worker's prompts are given to others.
    pub lease_s: u64,
}

/// A version of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionName {
    /// What samples are marked with.
    pub weights: WeightVersion,
    /// Of its bytes ([`super::delta::hash`]), the low half first.
    hash: (u64, u64),
}

impl VersionName {
    /// Names bytes.
    pub fn of(weights: WeightVersion, bytes: &[u8]) -> VersionName {
        let hash = super::delta::hash(bytes);
        VersionName { weights, hash: (hash as u64, (hash >> 64) as u64) }
    }

    /// Of its bytes.
    pub fn hash(self) -> u128 {
        u128::from(self.hash.0) | u128::from(self.hash.1) << 64
    }
}

/// A worker wants prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// Its number.
    pub worker: u64,
    /// At most so many samples of prompts, but at least one prompt.
    pub samples: usize,
    /// The version that it has.
    pub has: Option<VersionName>,
    /// Whether it is at work, and so can take no other version.
    pub busy: bool,
}

/// What a worker is to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Sample these prompts with the version that it has.
    Prompts(Vec<Request>),
    /// Take over this version and ask again.
    Weights(VersionName),
    /// Ask again.
    Nothing,
    /// The run is over.
    End,
}

/// The samples of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The prompt's global number.
    pub key: SampleKey,
    /// In their order.
    pub samples: Vec<Sample>,
}

/// What a worker has made; without answers a sign of life.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Its number.
    pub worker: u64,
    /// The version that made them.
    pub version: VersionName,
    /// Prompts that are complete.
    pub answers: Vec<Answer>,
    /// What went wrong, where a prompt could not be sampled: the trainer does it itself and says so.
    pub failed: Option<(SampleKey, String)>,
}

wire!(Hello { program, kind, name });
wire!(VersionName { weights, hash });
wire!(Ask { worker, samples, has, busy });
wire!(Answer { key, samples });
wire!(Report { worker, version, answers, failed });
wire!(SampleKey { seed, step, prompt });
wire!(Sampling { temperature, top_p, top_k, min_p });
wire!(Request {
    prompt,
    n,
    first_sample,
    sampling,
    logit_bias,
    min_new,
    key,
    max_new,
    max_new_of,
    stop_ids,
    stop_strings,
    top_logprobs,
    prompt_logprobs,
    prompt_top_logprobs,
    salt,
});

impl Wire for Work {
    fn put(&self, to: &mut Vec<u8>) {
        match self {
            Work::Prompts(requests) => {
                0u8.put(to);
                requests.put(to);
            }
            Work::Weights(version) => {
                1u8.put(to);
                version.put(to);
            }
            Work::Nothing => 2u8.put(to),
            Work::End => 3u8.put(to),
        }
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        match u8::take(from)? {
            0 => Some(Work::Prompts(Vec::take(from)?)),
            1 => Some(Work::Weights(VersionName::take(from)?)),
            2 => Some(Work::Nothing),
            3 => Some(Work::End),
            _ => None,
        }
    }
}

impl Wire for Welcome {
    fn put(&self, to: &mut Vec<u8>) {
        let Welcome { worker, config, network, engine, lease_s } = self;
        (*worker, config.clone()).put(to);
        // Recipes with adapters have no workers.
        let NetworkOptions { format, head_format, kv_format, trained, pack_once: _, positions, lora: _ } =
            network;
        vec![format.name().to_string(), head_format.name().to_string(), kv_format.name().to_string()].put(to);
        (*trained, *positions).put(to);
        (engine.to_vec(), *lease_s).put(to);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let (worker, config) = Wire::take(from)?;
        let names = <Vec<String>>::take(from)?;
        let [format, head, kv] = names.as_slice() else { return None };
        let (trained, positions) = Wire::take(from)?;
        let network = NetworkOptions {
            format: format.parse::<Format>().ok()?,
            head_format: head.parse::<Format>().ok()?,
            kv_format: KvFormat::ALL.into_iter().find(|format| format.name() == kv)?,
            trained,
            pack_once: false,
            positions,
            lora: None,
        };
        let (engine, lease_s) = <(Vec<usize>, u64)>::take(from)?;
        Some(Welcome { worker, config, network, engine: engine.try_into().ok()?, lease_s })
    }
}

/// A whole message, and nothing after it.
pub fn read<T: Wire>(mut bytes: &[u8]) -> Option<T> {
    T::take(&mut bytes).filter(|_| bytes.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_travel_whole_and_torn_ones_are_none() {
        let version = VersionName { weights: WeightVersion { version: 3, checksum: 7 }, hash: (1, u64::MAX) };
        let request = Request { stop_ids: vec![2, 9], n: 4, first_sample: 1, ..Request::new(vec![5, 6], 8) };
        let work = Work::Prompts(vec![request.clone(), Request { max_new_of: vec![1, 2], ..request }]);
        for work in [work, Work::Weights(version), Work::Nothing, Work::End] {
            let bytes = work.bytes();
            for cut in 0..bytes.len() {
                assert_eq!(read::<Work>(&bytes[..cut]), None);
            }
            assert_eq!(read(&[&bytes[..], &[0]].concat()), None::<Work>);
            assert_eq!(read(&bytes), Some(work));
        }
        let network = NetworkOptions {
            lora: None,
            format: Format::Int8,
            head_format: Format::Bf16,
            kv_format: KvFormat::Fp8,
            trained: false,
            pack_once: false,
            positions: 77,
        };
        let welcome = Welcome { worker: 2, config: "{}".into(), network, engine: [1, 2, 3, 4], lease_s: 60 };
        assert_eq!(read(&welcome.bytes()), Some(welcome));
    }
}
