"""Risk control: finite-sample bounds, multiple testing over thresholds, and budgets for reasoning (``risk.budget``)."""

from jaxmeth.risk import budget as budget
from jaxmeth.risk.bounds import binomial_cdf as binomial_cdf
from jaxmeth.risk.bounds import clopper_pearson_upper as clopper_pearson_upper
from jaxmeth.risk.bounds import crc_upper as crc_upper
from jaxmeth.risk.bounds import empirical_bernstein_ucb as empirical_bernstein_ucb
from jaxmeth.risk.bounds import hb_pvalue as hb_pvalue
from jaxmeth.risk.bounds import hb_upper as hb_upper
from jaxmeth.risk.bounds import hoeffding_pvalue as hoeffding_pvalue
from jaxmeth.risk.bounds import hoeffding_ucb as hoeffding_ucb
from jaxmeth.risk.selective import cascade_apply as cascade_apply
from jaxmeth.risk.selective import cascade_calibrate as cascade_calibrate
from jaxmeth.risk.selective import fixed_sequence_test as fixed_sequence_test
from jaxmeth.risk.testing import Selection as Selection
from jaxmeth.risk.testing import Summary as Summary
from jaxmeth.risk.testing import bonferroni as bonferroni
from jaxmeth.risk.testing import calibrate as calibrate
from jaxmeth.risk.testing import fixed_sequence as fixed_sequence
from jaxmeth.risk.testing import select as select
from jaxmeth.risk.testing import select_split as select_split
from jaxmeth.risk.testing import summarise as summarise
from jaxmeth.risk.testing import upper_bounds as upper_bounds
