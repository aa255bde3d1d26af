"""Random numbers that belong to a key and a global position, not to a rank: pure functions of a key, and `scope`, from
which torch's own random functions draw."""

from vescale_fn.random.draws import bernoulli as bernoulli
from vescale_fn.random.draws import bits as bits
from vescale_fn.random.draws import categorical as categorical
from vescale_fn.random.draws import dropout as dropout
from vescale_fn.random.draws import exponential as exponential
from vescale_fn.random.draws import fold_in as fold_in
from vescale_fn.random.draws import gumbel as gumbel
from vescale_fn.random.draws import key as key
from vescale_fn.random.draws import normal as normal
from vescale_fn.random.draws import permutation as permutation
from vescale_fn.random.draws import randint as randint
from vescale_fn.random.draws import split as split
from vescale_fn.random.draws import truncated_normal as truncated_normal
from vescale_fn.random.draws import uniform as uniform
from vescale_fn.random.reuse import KeyReuseError as KeyReuseError
from vescale_fn.random.scope import scope as scope
